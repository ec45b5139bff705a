"""The compiled norm gives transformers' own, in value and gradients, and takes the place of no other norm."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tuner.model.native import layers, library
from tuner.model.native.layers import apply_native_norms, native_rms_norm

BF16, FP32 = torch.bfloat16, torch.float32


def norm(kind: type[nn.Module], columns: int, dtype: torch.dtype = FP32) -> nn.Module:
    module = kind(columns, 1e-6)
    with torch.no_grad():
        module.weight.copy_(torch.randn(columns, generator=torch.Generator().manual_seed(1)))
    return module.to(dtype)


@pytest.mark.parametrize("columns", [3, 8, 16, 33, 256])
@pytest.mark.parametrize(("inputs", "weights", "allowed"), [(FP32, FP32, 1e-6), (BF16, FP32, 5e-3), (BF16, BF16, 8e-3)])
def test_equals_transformers(columns: int, inputs: torch.dtype, weights: torch.dtype, allowed: float) -> None:
    """Value and gradients lie as near to those of float64 as their types allow; types and shapes are transformers'."""
    generator = torch.Generator().manual_seed(columns)
    source = (torch.randn(2, 19, columns, generator=generator) * 5).to(inputs).requires_grad_()
    module = norm(LlamaRMSNorm, columns, weights)
    own = module(source)
    upstream = torch.randn(2, 19, columns, generator=generator).to(own.dtype)
    exact, factor = (tensor.detach().double().requires_grad_() for tensor in (source, module.weight))
    expected = factor * exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    wanted = [expected, *torch.autograd.grad(expected, (exact, factor), upstream.double())]
    assert apply_native_norms(module) == 1
    output = module(source)
    found = [output, *torch.autograd.grad(output, (source, module.weight), upstream)]
    assert [t.dtype for t in found] == [own.dtype, inputs, weights] and output.shape == own.shape
    for one, other in zip(found, wanted, strict=True):
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < allowed


def test_the_same_bits_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    source, found = torch.randn(100, 48).requires_grad_(), []
    weight = torch.randn(48).requires_grad_()
    for count in (1, 2, 3):
        monkeypatch.setattr(library, "threads", lambda count=count: count)
        output, _ = native_rms_norm(source, weight, 1e-5)
        found.append([output, *torch.autograd.grad(output.square().sum(), (source, weight))])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_only_norms_that_are_shown_to_be_the_same_are_changed() -> None:
    class OtherRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 1.001

    same = nn.ModuleList([norm(LlamaRMSNorm, 8), norm(Qwen3RMSNorm, 8)])
    others = nn.ModuleList([Gemma3RMSNorm(8), OtherRMSNorm(8), nn.LayerNorm(8)])
    assert apply_native_norms(same) == 2
    assert apply_native_norms(others) == 0
    source = torch.randn(3, 8)
    expected = Olmo2RMSNorm(8)(source)
    module = Olmo2RMSNorm(8)
    apply_native_norms(module)
    torch.testing.assert_close(module(source), expected)


def test_a_frozen_weight_gets_no_gradient_and_other_types_are_left_to_the_module() -> None:
    module, source = norm(LlamaRMSNorm, 8), torch.randn(3, 8).requires_grad_()
    apply_native_norms(module)
    module.weight.requires_grad_(False)
    module(source).sum().backward()
    assert module.weight.grad is None and source.grad is not None
    double = torch.randn(3, 8, dtype=torch.float64)
    assert module.double()(double).dtype == torch.float64


def test_strided_rows_and_what_is_no_number() -> None:
    source = torch.randn(4, 6, 8).transpose(0, 1)
    expected = norm(LlamaRMSNorm, 8)(source)
    module = norm(LlamaRMSNorm, 8)
    apply_native_norms(module)
    torch.testing.assert_close(module(source), expected)
    source[2, 1, 3] = torch.nan
    found = module(source)
    assert found[2, 1].isnan().all() and found[2, 0].isfinite().all()


@pytest.mark.parametrize("types", [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_what_a_compiler_is_told_of_results_holds(types: tuple[torch.dtype, torch.dtype]) -> None:
    source, weight = torch.randn(2, 5, 8).to(types[0]), torch.randn(8).to(types[1])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(native_rms_norm, (source, weight, 1e-6), test_utils=tests)
    output, inverse = native_rms_norm(source, weight, 1e-6)
    for wanted in (True, False):
        arguments = (torch.randn_like(output), source, weight, inverse, wanted)
        torch.library.opcheck(layers._norm_backward, arguments, test_utils=tests)
