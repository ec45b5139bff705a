"""An adapter on a weight that the model does not use by calling its layer, or that several layers share, is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.model.tiny import tiny_config
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec, add_lora, require_used

IDS = torch.arange(12)[None] % 7


def adapted() -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj", "k_proj"]), seed=0)
    return model


def check(model: nn.Module) -> None:
    require_used(model, lambda: model(input_ids=IDS).logits)  # type: ignore[arg-type]


def test_layers_that_are_called_are_fine() -> None:
    check(adapted())


def test_a_weight_that_is_read_without_a_call() -> None:
    model = adapted()
    attention = model.get_submodule("model.layers.0.self_attn")
    layer = attention.q_proj

    class Read(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, layer.get_base_layer().weight)

    attention.q_proj = Read()
    attention.kept = layer
    before = layer.get_base_layer().weight.clone()
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.kept cannot be adapted: its weight is read"):
        check(model)
    assert torch.equal(layer.get_base_layer().weight, before)


def test_a_weight_that_is_read_in_training_alone() -> None:
    model = adapted()
    attention = model.get_submodule("model.layers.0.self_attn")
    layer = attention.q_proj

    class Read(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, layer.get_base_layer().weight) if self.training else layer(x)

    attention.q_proj = Read()
    attention.kept = layer
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.kept cannot be adapted: its weight is read"):
        check(model)
    assert not model.training


def test_a_model_that_gives_an_adapter_no_gradients() -> None:
    model = adapted()
    for block in model.get_submodule("model.layers"):  # as reversible layers do whose input needs none
        block.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(RecipeError, match="a llama model gives an adapter no gradients"):
        check(model)


def test_a_layer_that_nothing_reads_is_fine() -> None:
    """An expert that no token is routed to."""
    model = adapted()
    model.get_submodule("model.layers.0").idle = adapted().get_submodule("model.layers.0.self_attn.q_proj")
    check(model)


def test_a_weight_that_blocks_share() -> None:
    model = adapted()
    first, second = (model.get_submodule(f"model.layers.{i}.self_attn.q_proj") for i in (0, 1))
    second.get_base_layer().weight = first.get_base_layer().weight
    with pytest.raises(RecipeError, match=r"blocks share its weight.*") as caught:
        check(model)
    assert caught.value.hint == "leave it out: adapter.target_modules: [k_proj]"
