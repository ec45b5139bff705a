"""Root-mean-square norms and gated layers (SwiGLU) on the CPU: operations over our kernels in C, and what takes them.

SwiGLU saves the two branches alone for the backward pass, not the gate's activation.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tuner.model.native import library
from tuner.model.native.library import TYPES
from tuner.model.wrap import Wrapper, wrap

_PARTS = 16  # PARTS of rms_norm.c
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


@torch.library.custom_op("tuner::native_rms_norm", mutates_args=())
def native_rms_norm(source: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``source`` ``[..., D]`` over the root of its rows' mean square plus ``epsilon``, times ``weight`` ``[D]``.

    Both are of :data:`TYPES`; as in transformers the quotient is rounded to the source's type, and the result has the
    wider type of both. The second result, float32 of one number a row, is for the backward pass.
    """
    source, weight = source.contiguous(), weight.contiguous()
    output, inverse = _normal(source, weight)
    _run_norm("rms_norm_forward", source, weight, output.dtype, epsilon=epsilon, output=output, inverse=inverse)
    return output, inverse


@native_rms_norm.register_fake
def _normal(source: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = source.new_empty(source.shape, dtype=torch.promote_types(source.dtype, weight.dtype))
    return output, source.new_empty(source.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("tuner::native_rms_norm_backward", mutates_args=())
def _norm_backward(
    upstream: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, wants_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of source and weight; the latter is empty where it is not wanted."""
    upstream, source, weight = upstream.contiguous(), source.contiguous(), weight.contiguous()
    grad_source = torch.empty_like(source)
    parts = source.new_empty(_PARTS, len(weight), dtype=torch.float32) if wants_weight else None
    tensors = {"inverse": inverse, "upstream": upstream, "grad_input": grad_source, "grad_weight": parts}
    _run_norm("rms_norm_backward", source, weight, upstream.dtype, **tensors)
    return grad_source, weight.new_empty(0) if parts is None else parts.sum(0).to(weight.dtype)


def _run_norm(
    function: str, source: torch.Tensor, weight: torch.Tensor, output_type: torch.dtype,
    **fields: torch.Tensor | float | None,
) -> None:
    library.call(
        function, "RmsNorm", input=source, weight=weight, rows=source.numel() // len(weight), columns=len(weight),
        input_is_bfloat=source.dtype == torch.bfloat16, weight_is_bfloat=weight.dtype == torch.bfloat16,
        output_is_bfloat=output_type == torch.bfloat16, **fields,
    )


_norm_backward.register_fake(
    lambda upstream, source, weight, inverse, wants_weight: (
        source.new_empty(source.shape), weight.new_empty(weight.shape if wants_weight else (0,))
    )
)


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate_norm(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wants_weight = ctx.needs_input_grad[1]
    grad_source, grad_weight = _norm_backward(upstream, *ctx.saved_tensors, wants_weight)
    return grad_source, grad_weight if wants_weight else None, None


native_rms_norm.register_autograd(_differentiate_norm, setup_context=_remember_norm)


def apply_native_norms(model: nn.Module) -> None:
    """Let the model's norms be computed by the kernel where it is shown to give what they give.

    A class is such whose own forward gives, for random rows and weights of both types, the kernel's result.
    """
    proven: dict[tuple[type, int, float], bool] = {}
    for module in model.modules():
        if (epsilon := _epsilon(module)) is None:
            continue
        key = (type(module), len(module.weight), epsilon)  # type: ignore[arg-type]
        if key not in proven:
            proven[key] = _is_same_norm(module, len(module.weight), epsilon)  # type: ignore[arg-type]
        if proven[key]:
            wrap(module, Wrapper.KERNEL, _norm_forward(module, epsilon))


def _epsilon(module: nn.Module) -> float | None:
    """That of a norm of rows; None for other modules."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) and [*module.named_parameters()] == [("weight", weight)] else None


@torch.no_grad()
def _is_same_norm(module: nn.Module, columns: int, epsilon: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(3, columns, generator=generator) * 3, torch.randn(columns, generator=generator)
    for types in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        source, factor = rows.to(types[0]), weight.to(types[1])
        expected = torch.func.functional_call(module, {"weight": factor}, (source,))
        found, _ = native_rms_norm(source, factor, epsilon)
        # Rows whose sum is added up in another order may round to the neighbouring bfloat16 number.
        if not library.is_same(found, expected, 2e-6 if found.dtype == types[0] == torch.float32 else 2**-7, 1e-6):
            return False
    return True


def _norm_forward(module: nn.Module, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    own: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if hidden_states.is_cuda or hidden_states.dtype not in TYPES or weight.dtype not in TYPES:
            return own(hidden_states)
        normal: torch.Tensor = native_rms_norm(hidden_states, weight, epsilon)[0]
        return normal

    return forward


@torch.library.custom_op("tuner::native_swiglu", mutates_args=())
def native_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, all of one shape and of one of :data:`TYPES`, computed in float32.

    As in transformers the activation is rounded to the branches' type before the product.
    """
    gate, up = gate.contiguous(), up.contiguous()
    output = torch.empty_like(gate)
    is_bfloat = gate.dtype == torch.bfloat16
    library.call("swiglu_forward", "SwiGlu", gate=gate, up=up, output=output, count=gate.numel(), is_bfloat=is_bfloat)
    return output


@torch.library.custom_op("tuner::native_swiglu_backward", mutates_args=())
def _gate_backward(upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up."""
    gate, up = gate.contiguous(), up.contiguous()
    tensors = {"gate": gate, "up": up, "upstream": upstream.contiguous()}
    tensors |= {"grad_gate": torch.empty_like(gate), "grad_up": torch.empty_like(up)}
    is_bfloat = gate.dtype == torch.bfloat16
    library.call("swiglu_backward", "SwiGlu", **tensors, count=gate.numel(), is_bfloat=is_bfloat)
    return tensors["grad_gate"], tensors["grad_up"]


native_swiglu.register_fake(lambda gate, up: gate.new_empty(gate.shape))
_gate_backward.register_fake(lambda upstream, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
native_swiglu.register_autograd(
    lambda ctx, upstream: _gate_backward(upstream, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def apply_native_gates(model: nn.Module) -> None:
    """Let the model's gated layers take the kernel where it is shown to give what they give.

    A module is such whose own forward, between projections that only scale, gives the kernel's result.
    """
    for module in model.modules():
        if {name for name, _ in module.named_children()} >= _PROJECTIONS and _is_same_gate(module):
            wrap(module, Wrapper.KERNEL, _gate_forward(module))


class Factor(nn.Module):
    """Stands in for a projection: rows ``[..., n]`` stay as wide as they are."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows times the factor."""
        return rows * self.factor


@torch.no_grad()
def _is_same_gate(module: nn.Module) -> bool:
    if "forward" in vars(module):  # bound to the module, whatever stands in for its projections
        return False
    bare = copy.copy(module)
    bare._modules = {**module._modules, "gate_proj": Factor(3.0), "up_proj": Factor(-2.0), "down_proj": Factor(0.5)}
    rows = torch.linspace(-9, 9, 64).reshape(1, 2, 32)
    for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):
        source = rows.to(dtype)
        try:
            expected = type(module).forward(bare, source)
        except (RuntimeError, TypeError, AttributeError):  # there is more between its projections, or it takes more
            return False
        if not library.is_same(native_swiglu(source * 3.0, source * -2.0) * 0.5, expected, allowed, 1e-6):
            return False
    return True


def _gate_forward(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        native = not gate.is_cuda and gate.dtype in TYPES and up.dtype == gate.dtype
        projected: torch.Tensor = module.down_proj(native_swiglu(gate, up) if native else functional.silu(gate) * up)
        return projected

    return forward
