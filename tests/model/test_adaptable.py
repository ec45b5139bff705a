"""Which linear layers an adapter is put on: found without running them, on a model without storage too."""

import pytest
import torch
from torch import nn

from tests.model.tiny import tiny_config
from tuner.model.adaptable import READ, SHARED, is_linear, not_adaptable
from tuner.model.adapter import LoraSpec, add_lora, lora_layers


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
