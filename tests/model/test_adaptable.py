"""Which linear layers an adapter is put on, found without running them, on a model without storage too; one on a
weight that the model does not use by calling its layer, or that several layers share, is refused.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.model.tiny import family_model, tiny_config
from tuner.errors import RecipeError
from tuner.model.adaptable import READ, SHARED, is_linear, not_adaptable
from tuner.model.adapter import LoraSpec, add_lora, lora_layers, require_used
from tuner.model.quantize.codes import Kind
from tuner.model.quantize.layers import QuantizeSpec, quantize_


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x).topk(1)


class Written(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Holder(nn.Module):
    """Reads a weight for a kernel; asks the others what they are, and clamps one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.given, self.clamped = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clamped.weight.data.clamp_(-1, 1)
        x = self.clamped(self.called(x.to(self.called.weight.dtype)))
        return nn.functional.linear(x, self.given.weight) if x.is_cuda else self.given(x)


def test_layers_that_compute_a_product_and_nothing_else() -> None:
    assert is_linear(nn.Linear(3, 5)) and is_linear(Written(3, 5).to("meta"))
    others = (Doubled(3, 5), Router(3, 5), nn.MultiheadAttention(4, 2).out_proj, nn.Embedding(3, 5))
    assert not any(map(is_linear, others))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_weight_that_only_a_kernel_of_cuda_is_given(device: str) -> None:
    model = nn.Sequential(Holder(), Holder()).to(device)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert not_adaptable(model, layers) == {"0.given": READ, "1.given": READ}
    model[1].called.weight = model[0].called.weight
    assert not_adaptable(model, layers) == {f"{i}.given": READ for i in (0, 1)} | {
        f"{i}.called": SHARED for i in (0, 1)
    }


def test_all_linear_leaves_them_out_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_config(tiny_config("llama")) for _ in range(2)]
    with torch.device("meta"):
        models.append(AutoModelForCausalLM.from_config(tiny_config("llama")))
    for model in models[1:]:
        first, second = (model.get_submodule(f"model.layers.{i}.self_attn") for i in (0, 1))
        second.q_proj.weight = first.q_proj.weight
    adapted = []
    for model in models:
        add_lora(model, LoraSpec(2, 4, 0.0, "all-linear"), seed=0)
        adapted.append({name for name, _ in lora_layers(model)})
    assert adapted[0] - adapted[1] == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}
    assert adapted[1] == adapted[2]
    said = capsys.readouterr().err
    assert said.count("all-linear leaves out q_proj (blocks share its weight") == 1


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
