"""An adapter's product is added inside the matrix product: peft's numbers, without its passes over the result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.fixtures.packed import drawn_root
from tests.fixtures.tensors import Operations
from tests.model.test_adapter import SPEC, adapted
from tests.model.tiny import tiny_config
from tuner.model import adapter
from tuner.model.adaptable import add_in_product, takes_product
from tuner.model.adapter import ADAPTER, adapter_off, add_lora, lora_layers

TOKENS, INPUTS, OUTPUTS = 24, 16, 32


def layer(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64))
    model.requires_grad_(False)
    config = LoraConfig(r=4, lora_alpha=10, lora_dropout=dropout, target_modules=["0"])
    inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return model[0].to(dtype)


def results(one: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    source = torch.randn(1, TOKENS, INPUTS, dtype=dtype, requires_grad=True)
    output = one(source)
    output.pow(2).sum().backward()
    grads = [one.lora_A[ADAPTER].weight.grad, one.lora_B[ADAPTER].weight.grad]
    return [output.detach(), source.grad, *grads]  # type: ignore[list-item]


def passes(func: Any, args: Any, result: Any) -> list[str]:
    """Elementwise operations over as many numbers as the layer's result has."""
    is_one = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.add)
    return [str(func)] if is_one and result.numel() == TOKENS * OUTPUTS else []


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_values_and_gradients_are_pefts(dropout: float) -> None:
    expected, ours = layer(dropout=dropout), layer(dropout=dropout)
    add_in_product(ours)
    torch.testing.assert_close(results(ours), results(expected), rtol=1e-12, atol=1e-12)


def test_no_pass_over_the_result_is_left() -> None:
    counts = []
    for fused in (False, True):
        one = layer()
        if fused:
            add_in_product(one)
        source = torch.randn(1, TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
        with Operations(passes) as seen:
            one(source).backward(torch.ones(1, TOKENS, OUTPUTS, dtype=torch.float64))
        counts.append(len(seen.found))
    assert counts == [3, 0]


def test_under_autocast_it_rounds_less_often_than_peft() -> None:
    exact = results(layer())[0]
    errors = []
    for fused in (False, True):
        one = layer(torch.float32)
        if fused:
            add_in_product(one)
        torch.manual_seed(1)
        source = torch.randn(1, TOKENS, INPUTS, dtype=torch.float64).float()
        with torch.autocast("cpu", torch.bfloat16):
            output = one(source).detach()
        assert output.dtype == torch.bfloat16
        errors.append(float((output.double() - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] < 0.02


def test_a_model_gets_it_in_every_plain_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = adapted(tmp_path, "llama")
    layers = [each for _, each in lora_layers(root.model)]
    assert layers and all(takes_product(each, ADAPTER) and "forward" in vars(each) for each in layers)
    where = (torch.arange(4), torch.arange(4), (4,), torch.arange(4))
    plain = drawn_root(tiny_config("llama"), tmp_path).model
    with adapter_off(root.model):
        without = root.logits(*where)
    for each in layers:
        torch.nn.init.normal_(each.lora_B[ADAPTER].weight)
    monkeypatch.setattr(adapter.adaptable, "add_in_product", lambda *_: None)
    add_lora(plain, SPEC, seed=3)
    plain.load_state_dict(root.model.state_dict())
    theirs = type(root)(plain).logits(*where)
    torch.testing.assert_close(root.logits(*where), theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(without, theirs)


def test_dora_keeps_its_own(tmp_path: Path) -> None:
    from dataclasses import replace

    root = adapted(tmp_path, "llama", replace(SPEC, use_dora=True))
    assert not any("forward" in vars(each) for _, each in lora_layers(root.model))
