"""Adapters, frozen parts, recomputed and compiled layers: one process and two FSDP2 processes take the same steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.multi.parity import steps_of_two, take_steps
from tests.train.synthetic import write_model
from tuner.model.build import ModelSpec, build_model
from tuner.runtime.dist import RankInfo

BLOCK = "model.layers.{}.{}.weight"
WISHES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_agree(tmp_path: Path) -> None:
    write_model(tmp_path)
    build_model(ModelSpec(str(tmp_path)), torch.bfloat16, seed=0).save_pretrained(tmp_path / "half")
    wishes = [{**wish, "model": str(tmp_path / wish.get("model", ""))} for wish in WISHES.values()]
    two = steps_of_two(wishes, tmp_path)
    for name, wish, there in zip(WISHES, wishes, two, strict=True):
        here = take_steps({**wish, "train": {}}, RankInfo())
        assert here["trained"] == there["trained"]
        assert bool(there["compilations"]) == wish.get("train", {}).get("compile", False)
        assert here["loss"][0] != here["loss"][-1], "the weights must have moved"
        bound = 2e-3 if wish.get("precision") == "bf16" else 1e-5  # a rounded update moves the later steps apart
        bound = 1e-6 if "quantize" in wish.get("model_keys", {}) else bound
        for figure in ("loss", "grad_norm"):
            for a, b in zip(here[figure], there[figure], strict=True):
                assert abs(a - b) <= bound * abs(a), (name, figure, here, there)
    assert two[0]["trained"] == sorted(
        ["model.norm.weight"]
        + [BLOCK.format(1, f"self_attn.{part}_proj") for part in "qkvo"]
        + [BLOCK.format(1, part) for part in ("input_layernorm", "post_attention_layernorm")]
    )
