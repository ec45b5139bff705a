"""Adapters: what is trained, in which type, and from which seed."""

from pathlib import Path

import pytest
import torch

from tests.model.tiny import tiny_config
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model, build_skeleton
from tuner.model.root import CausalLM, trained_parameters

SPEC = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_proj"])


def adapted(directory: Path, kind: str, spec: LoraSpec = SPEC, dtype: torch.dtype = torch.float32) -> CausalLM:
    tiny_config(kind).save_pretrained(directory)
    model = build_model(ModelSpec(str(directory), random_init=True), dtype, seed=1)
    add_lora(model, spec, seed=3)
    return CausalLM(model)


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_exactly_the_adapter_is_trained(kind: str, tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.self_attn.{module}.lora_{part}.default.weight"
        for layer in range(2)
        for module in ("q_proj", "v_proj")
        for part in "AB"
    ]
    assert sorted(trained_parameters(adapted(tmp_path, kind))) == sorted(names)


def test_the_adapter_is_float32_on_a_bfloat16_base(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", dtype=torch.bfloat16)
    trained = trained_parameters(root)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in root.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_all_linear_leaves_the_output_layer_alone(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, "all-linear"))
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_parameters(root)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_seed_decides_the_start_and_b_is_zero(tmp_path: Path) -> None:
    one, two = (trained_parameters(adapted(tmp_path, "qwen3")) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not one[name].any() for name in one if "lora_B" in name)
    assert all(one[name].any() for name in one if "lora_A" in name)


def test_a_skeleton_has_the_same_parameters(tmp_path: Path) -> None:
    root = adapted(tmp_path, "gpt2", LoraSpec(2, 4, 0.0, "all-linear"))
    skeleton = build_skeleton(tiny_config("gpt2"), torch.float32)
    add_lora(skeleton, LoraSpec(2, 4, 0.0, "all-linear"), seed=3)
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in root.model.named_parameters()}
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in skeleton.named_parameters()} == shapes
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="target_modules"):
        adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, ["qq_proj"]))
