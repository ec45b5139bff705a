"""An adapter on a weight that the model does not use by calling its layer, or that several layers share, is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.model.tiny import family_model
from tuner.errors import RecipeError
from tuner.model.adapter import LoraSpec, add_lora, require_used
from tuner.model.quantize.codes import Kind
from tuner.model.quantize.layers import QuantizeSpec, quantize_

IDS = torch.arange(12)[None] % 7


def adapted(kind: Kind | None = None) -> PreTrainedModel:
    model = family_model("llama", tied=False)
    if kind is not None:
        quantize_(model, QuantizeSpec(kind))
    add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj", "k_proj"]), seed=0)
    return model


def check(model: PreTrainedModel) -> None:
    require_used(model, lambda: model(input_ids=IDS).logits)


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_layers_that_are_called_are_fine(kind: Kind | None) -> None:
    check(adapted(kind))


class Around(nn.Module):
    """Reads the weight of a layer that it never calls, or not in training."""

    def __init__(self, layer: Any, calls: bool) -> None:
        super().__init__()
        self.layer, self.calls = layer, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls and not self.training:
            return self.layer(x)  # type: ignore[no-any-return]
        return nn.functional.linear(x, self.layer.get_base_layer().weight)


@pytest.mark.parametrize("calls", [False, True], ids=["never called", "not in training"])
@pytest.mark.parametrize("kind", [None, "nf4"])
def test_a_weight_that_is_read_without_a_call(kind: Kind | None, calls: bool) -> None:
    model = adapted(kind)
    attention = model.get_submodule("model.layers.0.self_attn")
    before = attention.q_proj.get_base_layer().weight.clone()
    attention.q_proj = Around(attention.q_proj, calls)
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.q_proj\.layer cannot be adapted: its weight is read"):
        check(model)
    assert torch.equal(attention.q_proj.layer.get_base_layer().weight, before) and not model.training


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
