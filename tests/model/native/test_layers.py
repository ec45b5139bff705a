"""The compiled norm, SwiGLU and cross-entropy give transformers' and torch's own, in value and gradients, and take
the place of nothing else.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.model.tiny import taken
from tuner.model.kernels import native_into_gradient
from tuner.model.native import layers, library
from tuner.model.native.layers import apply_native_gates, apply_native_norms, native_rms_norm, native_swiglu
from tuner.model.output_layer import OutputLayer

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
    assert taken(apply_native_norms, module) == 1
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
    assert taken(apply_native_norms, same) == 2
    assert taken(apply_native_norms, others) == 0
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


SIZES = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.mark.parametrize("count", [1, 15, 16, 17, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize(("dtype", "allowed"), [(FP32, 1e-6), (BF16, 8e-3)])
def test_a_gate_equals_torch(count: int, dtype: torch.dtype, allowed: float) -> None:
    """Value and gradients lie as near to those of float64 as their type allows."""
    generator = torch.Generator().manual_seed(count)
    gate, up, upstream = ((torch.randn(count, generator=generator) * 4).to(dtype) for _ in range(3))
    exact = [tensor.double().requires_grad_() for tensor in (gate, up)]
    expected = functional.silu(exact[0]) * exact[1]
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    leaves = [tensor.requires_grad_() for tensor in (gate, up)]
    output = native_swiglu(*leaves)
    for one, other in zip([output, *torch.autograd.grad(output, leaves, upstream)], wanted, strict=True):
        assert one.dtype == dtype
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < allowed


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_large_numbers_and_what_is_none(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, torch.nan, torch.inf], dtype=dtype).requires_grad_()
    output = native_swiglu(gate, torch.full_like(gate, 2.0))
    expected = functional.silu(gate.detach()) * 2
    torch.testing.assert_close(output.detach(), expected, equal_nan=True, atol=1e-30, rtol=2e-2)
    (gradient,) = torch.autograd.grad(output[:6].sum(), gate)
    torch.testing.assert_close(gradient[:6], torch.tensor([0, 0, 0, 1, 2, 2], dtype=dtype), atol=1e-30, rtol=0)


def test_the_module_is_the_same_and_under_autocast_too() -> None:
    torch.manual_seed(0)
    module, source = LlamaMLP(LlamaConfig(**SIZES)), torch.randn(2, 5, 8)
    own, halved = module(source), _halved(module, source)
    assert taken(apply_native_gates, module) == 1
    torch.testing.assert_close(module(source), own)
    assert torch.equal(_halved(module, source), halved)
    double = module.double()(source.double())
    torch.testing.assert_close(double.float(), own)


def _halved(module: nn.Module, source: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: torch.Tensor = module(source)
    return found


class _Between(LlamaMLP):
    """Something stands between the product and the last projection, as in BitNet."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(self.norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
        return projected


class _Capped(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))
        return projected


def test_only_what_is_shown_to_be_the_same_is_changed() -> None:
    config = LlamaConfig(**SIZES)
    swapped = LlamaMLP(config)
    swapped.forward = swapped.forward  # type: ignore[method-assign]  # somebody's own, whatever it does
    gelu = LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu"))
    others = nn.ModuleList([_Between(config), _Capped(config), swapped, gelu, GemmaMLP(GemmaConfig(**SIZES))])
    assert taken(apply_native_gates, others) == 0
    assert taken(apply_native_gates, nn.ModuleList([LlamaMLP(config), *others])) == 1


def test_it_is_found_without_weights_as_well() -> None:
    with torch.device("meta"):
        same, other = LlamaMLP(LlamaConfig(**SIZES)), _Between(LlamaConfig(**SIZES))
    assert taken(apply_native_gates, same) == 1
    assert taken(apply_native_gates, other) == 0


def test_the_branches_alone_are_kept_for_the_backward_pass() -> None:
    gate, up = torch.randn(64, 3, requires_grad=True), torch.randn(64, 3, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        native_swiglu(gate, up)
    assert sorted(kept) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_a_compiler_is_told_of_gates_holds(dtype: torch.dtype) -> None:
    gate, up, upstream = (torch.randn(2, 5, 8).to(dtype) for _ in range(3))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(native_swiglu, (gate, up), test_utils=tests)
    torch.library.opcheck(layers._gate_backward, (upstream, gate, up), test_utils=tests)


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 1000, 8192 + 5])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_a_loss_equals_torch(columns: int, dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(9, columns, generator=generator) * 8).to(dtype)
    targets = torch.randint(0, columns, (9,), generator=generator)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, exact)
    for wants_gradient in (False, True):
        found = logits.clone()
        loss = native_into_gradient(found, targets, wants_gradient)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-5)
        if not wants_gradient:
            assert torch.equal(found, logits)
        else:
            scale = gradient.abs().max().clamp_min(1e-3)
            assert float((found.double() - gradient).abs().max() / scale) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_weights_of_the_rows(dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(9, 83, generator=generator) * 8).to(dtype)
    targets, weights = torch.randint(0, 83, (9,), generator=generator), torch.rand(9, generator=generator)
    weights[4] = 0.0
    exact = logits.double().requires_grad_()
    expected = (cross_entropy(exact, targets, reduction="none") * weights).sum()
    (gradient,) = torch.autograd.grad(expected, exact)
    loss = native_into_gradient(logits, targets, True, weights)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    assert float((logits.double() - gradient).abs().max() / gradient.abs().max()) < allowed
    assert not logits[4].any()


def test_weights_of_one_change_no_bit() -> None:
    logits, targets = torch.randn(9, 83), torch.randint(0, 83, (9,))
    plain, weighted = logits.clone(), logits.clone()
    losses = native_into_gradient(plain, targets, True), native_into_gradient(weighted, targets, True, torch.ones(9))
    assert torch.equal(*losses)
    assert torch.equal(plain, weighted)


def test_the_first_and_the_last_column_and_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0] * 7, [-1e30] * 20 + [3.0]])
    targets = torch.tensor([1, 20])
    found = logits.clone()
    loss = native_into_gradient(found, targets, True)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="sum")
    torch.testing.assert_close(loss.double(), expected.detach())
    torch.testing.assert_close(found.double(), torch.autograd.grad(expected, exact)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(bad: float) -> None:
    for place in (0, 17, 39):
        logits = torch.zeros(2, 40)
        logits[1, place] = bad
        assert not native_into_gradient(logits, torch.tensor([3, 3]), True).isfinite()
        assert logits[0].isfinite().all() and not logits[1].isfinite().all()


def test_no_rows_and_other_types() -> None:
    assert native_into_gradient(torch.empty(0, 40), torch.empty(0, dtype=torch.int64), True) == 0
    double, targets = torch.randn(4, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 6])
    expected = cross_entropy(double, targets, reduction="sum")
    torch.testing.assert_close(native_into_gradient(double.clone(), targets, False), expected)


def test_a_wrong_target_is_refused() -> None:
    for target in (-1, 7):
        with pytest.raises(IndexError, match="target"):
            native_into_gradient(torch.zeros(1, 7), torch.tensor([target]), True)


def test_through_the_linear_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=generator).requires_grad_() for n in (30, 50))
    targets = torch.randint(0, 50, (30,), generator=generator)
    found = OutputLayer(weight, kernel=native_into_gradient).cross_entropy(hidden, targets)
    expected = cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(found, expected)
    grads, wanted = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
