"""XTuner V1's typed configurations: what they become, and that it trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_other_arctic import two_steps
from tuner.config.dump import flatten, recipe_dict
from tuner.config.imported import import_text

BASE: dict[str, Any] = {
    "load_from": "./model",
    "dataset_cfg": [{"dataset": {"name": "rows", "anno_path": "./rows.jsonl", "sample_ratio": 1.0}}],
    "dataloader_cfg": {"pack_max_length": 64, "pack_level": "soft", "num_workers": 4},
    "optim_cfg": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5},
    "lr_cfg": {"lr_type": "cosine", "warmup_ratio": 0.1, "lr_min": 1e-4},
    "global_batch_size": 4,
    "total_step": 6,
}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {},
        {"optimizer.lr": 1e-3, "train.max_grad_norm": 0.5, "schedule.kind": "cosine", "schedule.warmup": "10%",
         "schedule.min_lr_ratio": 0.1, "data.max_length": 64, "train.duration": "6 steps"},
    ),
    "fsdp": (
        {"fsdp_cfg": {"recompute_ratio": 0.5, "torch_compile": False, "reshard_after_forward": False}, "seed": 9},
        {"train.gradient_checkpointing": "full", "train.gradient_checkpointing_layers": "50%", "train.compile": False,
         "parallel.reshard_after_forward": False, "seed": 9},
    ),
    "saves": (
        {"checkpoint_interval": 2, "checkpoint_maxkeep": 3, "hf_interval": 4, "hf_max_keep": 1, "work_dir": "./out",
         "exp_tracker": "jsonl"},
        {"checkpoint.every": "2 steps", "checkpoint.keep": 3, "export.every": "4 steps", "export.keep": 1},
    ),
    "share": (
        {"dataset_cfg": [{"dataset": {"anno_path": "./rows.jsonl", "sample_ratio": 0.5}}], "total_step": None,
         "total_epoch": 2},
        {"train.duration": "2 epochs"},
    ),
    "constant": (
        {"lr_cfg": {"lr_type": "constant", "warmup_ratio": 0}, "do_clip": False,
         "dataloader_cfg": {"pack_level": "none", "pack_max_length": 32}},
        {"schedule.kind": "constant", "schedule.warmup": "never", "data.packing": False, "data.max_length": 32,
         "train.max_grad_norm": "never"},
    ),
}  # fmt: skip


def text_of(name: str) -> str:
    return json.dumps({**BASE, **FILES[name][0]})


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_becomes_what_it_says(name: str) -> None:
    made = import_text(text_of(name), f"{name}.json")
    assert made.tool == "xtuner" and made.left == ()
    values, wanted = flatten(recipe_dict(made.recipe)), FILES[name][1]
    assert {key: values.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("name", FILES)
def test_what_it_becomes_trains(name: str, tmp_path: Path) -> None:
    two_steps(text_of(name), f"{name}.json", tmp_path)


def test_what_is_not_carried_over_is_said() -> None:
    more = {"optim_cfg": {"lr": 1e-3, "skip_grad_norm_threshold": 5.0}, "intra_layer_micro_batch": 2}
    left = " ".join(import_text(json.dumps(BASE | more), "x.json").left)
    assert "skip_grad_norm_threshold" in left and "intra_layer_micro_batch" in left
