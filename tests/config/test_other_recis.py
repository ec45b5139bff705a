"""RecIS's training arguments: what they become."""

import json

import pytest

from tuner.config.dump import flatten, recipe_dict
from tuner.config.imported import import_text

BANK = [
    {"path": "/m/a", "load": ["*"], "exclude": ["io_state", "layers.0"], "ignore_error": True},
    {"path": "/m/b", "is_dynamic": True, "oname": [{"model.layers.*.mlp.*": "dense.*.ffn.*"}]},
    {"path": "/m/c", "skip": True},
]
CASES = {
    "50 steps": ({"load_update_steps": 50, "train_steps": 100, "train_epoch": 2, "max_to_keep": 3},
                 {"train.duration": "200 steps", "train.precision": "fp32", "checkpoint.keep": 3}),
    "2 windows": ({"load_update_windows": 2, "window_iter": 4, "mixed_precision": "bf16", "train_epoch": 2},
                  {"train.duration": "2 epochs", "data.windows.per_launch": 4, "data.windows.passes": "stream"}),
}  # fmt: skip


@pytest.mark.parametrize("every", CASES)
def test_training_arguments_become_what_they_say(every: str) -> None:
    given, wanted = CASES[every]
    made = import_text(json.dumps({"model_bank": BANK, **given}), "args.json")
    values = flatten(recipe_dict(made.recipe))
    assert made.tool == "recis" and {key: values.get(key) for key in wanted} == wanted
    first, second = recipe_dict(made.recipe)["model"]["init_from"]
    assert (first["path"], first["load"], first["exclude"], first["strict"]) == ("/m/a", [], ["layers.0"], False)
    assert (second["rename"], second["every"]) == ({"dense.*.ffn.*": "model.layers.{1}.mlp.{2}"}, every)
