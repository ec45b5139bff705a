"""The compiled SwiGLU gives transformers' own, in value and gradients, and takes the place of nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from tuner.model.native import layers
from tuner.model.native.layers import apply_native_gates, native_swiglu

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2}


@pytest.mark.parametrize("count", [1, 15, 16, 17, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize(("dtype", "allowed"), [(FP32, 1e-6), (BF16, 8e-3)])
def test_equals_torch(count: int, dtype: torch.dtype, allowed: float) -> None:
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
    assert apply_native_gates(module) == 1
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
    assert apply_native_gates(others) == 0
    assert apply_native_gates(nn.ModuleList([LlamaMLP(config), *others])) == 1


def test_it_is_found_without_weights_as_well() -> None:
    with torch.device("meta"):
        same, other = LlamaMLP(LlamaConfig(**SIZES)), _Between(LlamaConfig(**SIZES))
    assert apply_native_gates(same) == 1
    assert apply_native_gates(other) == 0


def test_the_branches_alone_are_kept_for_the_backward_pass() -> None:
    gate, up = torch.randn(64, 3, requires_grad=True), torch.randn(64, 3, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        native_swiglu(gate, up)
    assert sorted(kept) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_a_compiler_is_told_of_results_holds(dtype: torch.dtype) -> None:
    gate, up, upstream = (torch.randn(2, 5, 8).to(dtype) for _ in range(3))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(native_swiglu, (gate, up), test_utils=tests)
    torch.library.opcheck(layers._gate_backward, (upstream, gate, up), test_utils=tests)
