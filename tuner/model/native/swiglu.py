"""SwiGLU on the CPU: one operation over our kernel in C (swiglu.c), and the modules that take it.

It saves the two branches alone for the backward pass, not the gate's activation beside them.
"""

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tuner.model.native.library import library, threads

TYPES = (torch.bfloat16, torch.float32)
"""What the kernel takes."""
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
_POINTERS = ("gate", "up", "upstream", "output", "grad_gate", "grad_up")


class _Call(ctypes.Structure):
    """`SwiGlu` of swiglu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("count", "is_bfloat", "threads")),
    )


def _call(function: str, **tensors: torch.Tensor) -> None:
    gate = tensors["gate"]
    call = _Call(
        count=gate.numel(),
        is_bfloat=gate.dtype == torch.bfloat16,
        threads=threads(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
    )
    getattr(library(), function)(ctypes.byref(call))


@torch.library.custom_op("tuner::native_swiglu", mutates_args=())
def native_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, all of one shape and of one of :data:`TYPES`, computed in float32.

    As in transformers the activation is rounded to the branches' type before the product.
    """
    gate, up = gate.contiguous(), up.contiguous()
    output = torch.empty_like(gate)
    _call("swiglu_forward", gate=gate, up=up, output=output)
    return output


@torch.library.custom_op("tuner::native_swiglu_backward", mutates_args=())
def _backward(upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up."""
    upstream, gate, up = upstream.contiguous(), gate.contiguous(), up.contiguous()
    grads = torch.empty_like(gate), torch.empty_like(up)
    _call("swiglu_backward", gate=gate, up=up, upstream=upstream, grad_gate=grads[0], grad_up=grads[1])
    return grads


@native_swiglu.register_fake
def _shapes(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@_backward.register_fake
def _backward_shapes(upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _backward(upstream, *ctx.saved_tensors)
    return found


native_swiglu.register_autograd(_differentiate, setup_context=_remember)


def apply_native_gates(model: nn.Module) -> int:
    """Let the model's gated layers take the kernel where it is shown to give what they give; returns how many.

    A module counts whose own forward, between projections that only scale, gives the kernel's result.
    """
    count = 0
    for module in model.modules():
        if {name for name, _ in module.named_children()} >= _PROJECTIONS and _is_the_same(module):
            module.forward = _forward(module)
            count += 1
    return count


class _Factor(nn.Module):
    """Stands in for a projection: rows stay as wide as they are."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


@torch.no_grad()
def _is_the_same(module: nn.Module) -> bool:
    if "forward" in vars(module):  # bound to the module, whatever stands in for its projections
        return False
    bare = copy.copy(module)
    bare._modules = {**module._modules, "gate_proj": _Factor(3.0), "up_proj": _Factor(-2.0), "down_proj": _Factor(0.5)}
    rows = torch.linspace(-9, 9, 64).reshape(1, 2, 32)
    for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
        source = rows.to(dtype)
        try:
            expected = type(module).forward(bare, source)
        except (RuntimeError, TypeError, AttributeError):  # there is more between its projections, or it takes more
            return False
        found = native_swiglu(source * 3.0, source * -2.0) * 0.5
        if not isinstance(expected, torch.Tensor) or expected.dtype != dtype or expected.shape != found.shape:
            return False
        if not torch.allclose(found, expected, rtol=allowed, atol=1e-6):
            return False
    return True


def _forward(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        native = not gate.is_cuda and gate.dtype in TYPES and up.dtype == gate.dtype
        projected: torch.Tensor = module.down_proj(native_swiglu(gate, up) if native else functional.silu(gate) * up)
        return projected

    return forward
