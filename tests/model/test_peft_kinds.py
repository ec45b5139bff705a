"""Adapters by peft's own configs: switched off they are not there, and what is not taken is refused by name."""

from typing import Any

import pytest
import torch

from tests.fixtures.hashes import frozen_hash
from tests.fixtures.peft_kinds import KINDS
from tests.model.tiny import VOCAB, family_model
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.model.adapter import adapter_off
from tuner.model.peft_kinds import PeftSpec, add_peft, flaws

LAYERS = {"target_modules": ["q_proj"]}
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 2, **LAYERS}
FLAWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({**PLAIN, "lora_alfa": 3}, ".lora_alfa", "LoraConfig has no such field"),
    "of another kind": ({"peft_type": "IA3", **LAYERS, "r": 4}, ".r", "IA3Config has no such field"),
    "type": ({**PLAIN, "r": "four"}, ".r", "got 'four': input should be a valid integer"),
    "biases": ({**PLAIN, "bias": "all"}, ".bias", "biases of the base stay frozen"),
    "experts": ({**PLAIN, "target_parameters": ["up"]}, ".target_parameters", "experts: true"),
    "eva": ({**PLAIN, "init_lora_weights": "eva"}, ".init_lora_weights", "from batches of data"),
    "loftq": ({**PLAIN, "init_lora_weights": "loftq"}, ".init_lora_weights", "model.quantize: nf4"),
    "random": ({**PLAIN, "init_lora_weights": "pissa_niter_4"}, ".init_lora_weights", "draws it again"),
    "written by exports": ({**PLAIN, "inference_mode": True}, ".inference_mode", "an export writes it"),
    "pefts own": ({"peft_type": "ADALORA", **LAYERS}, "", "total_step"),
    "ranks": ({"peft_type": "ADALORA", **LAYERS, "total_step": 9, "init_r": 4}, ".target_r", "fewer ranks than the 4"),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "output layer": ("llama", {**PLAIN, "target_modules": ["lm_head", "q_proj"]}, "lm_head cannot be adapted: it is"),
    "no linear layer": ("qwen3-moe", {**PLAIN, "target_modules": ["gate_proj", "up_proj", "down_proj"]}, "experts"),
    "nothing": ("llama", {**PLAIN, "target_modules": ["nothing"]}, "adapter.config: Target modules"),
    "trained in full": ("llama", {**PLAIN, "modules_to_save": ["self_attn"]}, "q_proj cannot be adapted: it is"),
    "no expression": ("llama", {**PLAIN, "target_modules": "["}, "adapter.config: unterminated character set"),
    "what peft refuses": ("llama", {"peft_type": "OFT", **LAYERS, "r": 4, "oft_block_size": 8}, "adapter.config"),
}


@pytest.mark.parametrize("name", KINDS)
def test_off_it_is_the_base_and_what_the_base_is_known_by_stays(name: str) -> None:
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    model, plain, moves = family_model("llama", False), family_model("llama", False), "init_lora_weights" in KINDS[name]
    wanted = plain(ids).logits
    add_peft(model, PeftSpec(KINDS[name], moves), seed=3)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-6)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert not torch.allclose(model(ids).logits, wanted, rtol=0, atol=1e-6)
    with adapter_off(model):
        assert torch.equal(model(ids).logits, wanted) != moves
    adapted = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert {name.replace(".base_layer.", ".") for name in adapted} == {name for name, _ in plain.named_parameters()}
    plain.requires_grad_(False)
    assert frozen_hash(model) == frozen_hash(plain)


@pytest.mark.parametrize("case", FLAWS)
def test_a_field_that_is_wrong_is_named(case: str) -> None:
    config, key, says = FLAWS[case]
    ((found, message, _),) = flaws(config)
    assert found == f"adapter.config{key}" and says in message


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_it_cannot_have_are_named(case: str) -> None:
    family, config, says = REFUSED[case]
    with pytest.raises(RecipeError, match=says):
        add_peft(family_model(family, False), PeftSpec(config), seed=0)


@pytest.mark.parametrize(
    ("config", "keys", "says"),
    [
        ({"peft_type": "P_TUNING"}, {}, "got peft_type 'P_TUNING'; those that change linear layers alone are IA3"),
        ({}, {}, "got no peft_type"),
        (PLAIN, {"model": {"quantize": "nf4"}}, "write model.quantize: none"),
        (PLAIN, {"train": {"precision": "fp8"}}, "write train.precision: bf16"),
        (PLAIN, {"parallel": {"tensor": 2}}, "write parallel.tensor: 1"),
        (PLAIN, {"parallel": {"expert": 2}}, "write parallel.expert: 1"),
        (PLAIN, {"model": {"init_from": ["x"]}}, "have no places"),
        (KINDS["pissa"], {}, "write model.dtype: fp32"),
        (KINDS["adalora"], {"train": {"precision": "fp16"}}, "write train.precision: bf16"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(config: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    model = {"name_or_path": "m", **keys.get("model", {})}
    tree = {"data": {"train": "x"}, "adapter": {"kind": "peft", "config": config}, **keys, "model": model}
    with pytest.raises(RecipeError) as refused:
        load_recipe(tree)
    assert says in str(refused.value)
