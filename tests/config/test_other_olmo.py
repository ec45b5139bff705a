"""OLMo-core's ladders as their configurations are written out: the ladder that they become."""

import json
from typing import Any

import pytest

from tuner.config.dump import flatten, recipe_dict
from tuner.config.imported import import_text

BASE: dict[str, Any] = {
    "_CLASS_": "olmo_core.model_ladder.base.ModelLadder",
    "name": "small", "dir": "/data/ladder", "project": None, "sizes": ["60M", "190M"], "max_devices": 8,
    "model_configurator": {"rank_microbatch_size": None, "model_construction_kwargs": {}},
    "run_configurator": {"chinchilla_multiple": 4.0, "stepped_schedule": False},
    "sequence_length": 4096, "seed": 7, "backend": "cpu:gloo,cuda:nccl", "data_loader": {"num_threads": 8},
    "tokenizer": {"identifier": "allenai/dolma2-tokenizer", "vocab_size": 100278, "eos_token_id": 100257},
    "instance_sources": [{"sources": [{"source_paths": ["/data/a/*.npy", "/data/b.npy"], "label": "web"}]}],
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {},
        {"name": "small", "output_dir": "/data/ladder", "seed": 7, "data.max_length": 4096, "data.rows": "cut",
         "tokenizer.name_or_path": "allenai/dolma2-tokenizer", "model.init": "random", "ladder.max_processes": 8,
         "ladder.multiples": [0.5, 1.0, 2.0, 4.0], "method.kind": "pretrain", "data.eval": "1%"},
    ),
    "laws": (
        {"run_configurator": {"chinchilla_multiple": 0.5, "decay_fraction": 0.2, "tokens_per_param": 40,
                              "lr_multiplier": 2}},
        {"ladder.multiples": [0.5], "ladder.decay": "20%", "ladder.tokens": "40 * N",
         "ladder.lr": "0.0047 * (N / 108M)^(-1/3)"},
    ),
    "a length that is no power of two": (
        {"run_configurator": {"chinchilla_multiple": 3}}, {"ladder.multiples": [0.375, 0.75, 1.5, 3.0]},
    ),
    "small words": (
        {"tokenizer": {"identifier": "gpt2", "vocab_size": 50257},
         "model_configurator": {"rank_microbatch_size": 16384}, "project": "scaling"},
        {"ladder.micro_batch_tokens": 16384, "logging.project": "scaling"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_ladder_becomes_what_it_says(name: str) -> None:
    given, wanted = CASES[name]
    made = import_text(json.dumps(BASE | given), "ladder.json")
    assert made.tool == "olmo-core" and [item.partition(":")[0] for item in made.left] == ["model.name_or_path"]
    values = flatten(recipe_dict(made.recipe))
    assert {key: values.get(key) for key in wanted} == wanted
    dtype = "uint16" if name == "small words" else "uint32"
    found = [(source["path"], source["dtype"]) for source in recipe_dict(made.recipe)["data"]["train"]]
    assert found == [("/data/a/*.npy", dtype), ("/data/b.npy", dtype)]


def test_what_a_ladder_says_that_is_not_carried_over_is_said() -> None:
    more = {"device_type": "NVIDIA H100 80GB HBM3", "model_configurator": {"model_construction_kwargs": {"n_kv": 2}}}
    left = " ".join(import_text(json.dumps(BASE | more), "ladder.json").left)
    assert "tuner ladder plan RECIPE --device" in left and "n_kv" in left
