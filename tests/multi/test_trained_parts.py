"""Adapters, frozen parts, recomputed and compiled layers: one process and two FSDP2 processes take the same steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import VOCAB
from tests.multi.launcher import run
from tests.multi.parity_worker import take_steps
from tests.train.synthetic import write_model
from tuner.model.build import ModelSpec, build_model
from tuner.runtime.dist import RankInfo

WORKER = str(Path(__file__).with_name("parity_worker.py"))
NONE = {"kind": "none"}
BLOCK = "model.layers.{}.{}.weight"
# In the first three every unit that FSDP2 shards mixes frozen and trained parameters, of two types in `saved`.
WISHES: dict[str, dict[str, Any]] = {
    "freeze": {"adapter": NONE, "model_keys": {"freeze": ["embed_tokens", "layers.0", "*.mlp"]}},
    "dora": {
        "adapter": {"kind": "dora", "r": 4, "dropout": 0.0, "target_modules": ["*layers.1.self_attn.*_proj"]},
        "train": {"compile": True},
    },
    "saved": {
        "adapter": {"kind": "lora", "r": 4, "use_rslora": True, "modules_to_save": ["embed_tokens", "layers.0.mlp"]},
        "precision": "bf16",
        "train": {"gradient_checkpointing": "selective"},
    },
    # Of these ids the first three have rows that were there, which the data holds; the weights grow by the others.
    "tokens": {"adapter": {"kind": "lora", "r": 4}, "new_ids": [VOCAB - 3, VOCAB + 2]},
    "tokens_rounded": {"adapter": {"kind": "lora", "r": 4}, "new_ids": [VOCAB - 3, VOCAB - 2], "precision": "bf16"},
    "nf4": {"adapter": {"kind": "lora", "r": 4}, "model_keys": {"quantize": "nf4"}},
    "int8": {
        "adapter": {"kind": "dora", "r": 4, "modules_to_save": ["layers.0.mlp"]},
        "model_keys": {"quantize": "int8"},
        "train": {"gradient_checkpointing": "selective", "compile": True},
    },
    "tokens_full": {"adapter": NONE, "new_ids": [VOCAB - 3, VOCAB + 2]},
    "full": {"adapter": NONE, "train": {"gradient_checkpointing": "full", "gradient_checkpointing_layers": "1 layer"}},
    "half_files": {"adapter": NONE, "model": "half"},  # each process reads bf16, and casts it
    "compiled": {"adapter": NONE, "train": {"gradient_checkpointing": "selective", "compile": True}},
}


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_agree(tmp_path: Path) -> None:
    write_model(tmp_path)
    plain = {"model": str(tmp_path), "precision": "fp32", "global": 4, "micro": 4, "steps": 3}
    build_model(ModelSpec(str(tmp_path)), torch.bfloat16, seed=0).save_pretrained(tmp_path / "half")
    wishes = [{**plain, "trained": [1, 20, 3, 15, 7, 5], **wish} for wish in WISHES.values()]
    for wish in wishes:
        wish["model"] = str(tmp_path / wish["model"])
    two = json.loads(run([WORKER, json.dumps([{**wish, "micro": 2} for wish in wishes])], 2))
    for name, wish, there in zip(WISHES, wishes, two, strict=True):
        here = take_steps({**wish, "train": {}}, RankInfo())
        assert here["trained"] == there["trained"]
        assert bool(there["compilations"]) == wish.get("train", {}).get("compile", False)
        assert here["loss"][0] != here["loss"][-1], "the weights must have moved"
        bound = 1e-5 if wish["precision"] == "fp32" else 2e-3  # a rounded update moves the later steps apart
        bound = 1e-6 if "quantize" in wish.get("model_keys", {}) else bound
        for figure in ("loss", "grad_norm"):
            for a, b in zip(here[figure], there[figure], strict=True):
                assert abs(a - b) <= bound * abs(a), (name, figure, here, there)
    assert two[0]["trained"] == sorted(
        ["model.norm.weight"]
        + [BLOCK.format(1, f"self_attn.{part}_proj") for part in "qkvo"]
        + [BLOCK.format(1, part) for part in ("input_layernorm", "post_attention_layernorm")]
    )
