"""Root-mean-square norms on the CPU: one operation over our kernel in C (rms_norm.c), and the modules that take it."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tuner.model.native.library import library, threads

TYPES = (torch.bfloat16, torch.float32)
"""What the kernel takes."""
_PARTS = 16  # PARTS of rms_norm.c
_POINTERS = ("input", "weight", "output", "inverse", "upstream", "grad_input", "grad_weight")
_NUMBERS = ("rows", "columns", "input_is_bfloat", "weight_is_bfloat", "output_is_bfloat", "threads")


class _Call(ctypes.Structure):
    """`RmsNorm` of rms_norm.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("epsilon", ctypes.c_double),
    )


def _call(function: str, epsilon: float, output_type: torch.dtype, **tensors: torch.Tensor | None) -> None:
    source, weight = tensors["input"], tensors["weight"]
    assert source is not None and weight is not None
    call = _Call(
        rows=source.numel() // len(weight),
        columns=len(weight),
        input_is_bfloat=source.dtype == torch.bfloat16,
        weight_is_bfloat=weight.dtype == torch.bfloat16,
        output_is_bfloat=output_type == torch.bfloat16,
        threads=threads(),
        epsilon=epsilon,
        **{name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
    )
    getattr(library(), function)(ctypes.byref(call))


@torch.library.custom_op("tuner::native_rms_norm", mutates_args=())
def native_rms_norm(source: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``source`` ``[..., D]`` over the root of its rows' mean square plus ``epsilon``, times ``weight`` ``[D]``.

    Both are of :data:`TYPES`; as in transformers the quotient is rounded to the source's type, and the result has the
    wider type of both. The second result, float32 of one number a row, is for the backward pass.
    """
    source, weight = source.contiguous(), weight.contiguous()
    output_type = torch.promote_types(source.dtype, weight.dtype)
    output = torch.empty_like(source, dtype=output_type)
    inverse = source.new_empty(source.shape[:-1], dtype=torch.float32)
    _call("rms_norm_forward", epsilon, output_type, input=source, weight=weight, output=output, inverse=inverse)
    return output, inverse


@torch.library.custom_op("tuner::native_rms_norm_backward", mutates_args=())
def _backward(
    upstream: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, wants_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of source and weight; the latter is empty where it is not wanted."""
    upstream, source, weight = upstream.contiguous(), source.contiguous(), weight.contiguous()
    grad_source = torch.empty_like(source)
    parts = source.new_empty(_PARTS, len(weight), dtype=torch.float32) if wants_weight else None
    _call(
        "rms_norm_backward",
        0.0,
        upstream.dtype,
        input=source,
        weight=weight,
        inverse=inverse,
        upstream=upstream,
        grad_input=grad_source,
        grad_weight=parts,
    )
    grad_weight = weight.new_empty(0) if parts is None else parts.sum(0).to(weight.dtype)
    return grad_source, grad_weight


@native_rms_norm.register_fake
def _shapes(source: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    output = source.new_empty(source.shape, dtype=torch.promote_types(source.dtype, weight.dtype))
    return output, source.new_empty(source.shape[:-1], dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(
    upstream: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, wants_weight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return source.new_empty(source.shape), weight.new_empty(weight.shape if wants_weight else (0,))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wants_weight = ctx.needs_input_grad[1]
    grad_source, grad_weight = _backward(upstream, *ctx.saved_tensors, wants_weight)
    return grad_source, grad_weight if wants_weight else None, None


native_rms_norm.register_autograd(_differentiate, setup_context=_remember)


def apply_native_norms(model: nn.Module) -> int:
    """Let the model's norms be computed by the kernel where it is shown to give what they give; returns how many.

    A class counts whose own forward gives, for random rows and weights of both types, the kernel's result.
    """
    proven: dict[tuple[type, int, float], bool] = {}
    count = 0
    for module in model.modules():
        epsilon = _epsilon(module)
        if epsilon is None:
            continue
        key = (type(module), len(module.weight), epsilon)  # type: ignore[arg-type]
        if key not in proven:
            proven[key] = _is_the_same(module, len(module.weight), epsilon)  # type: ignore[arg-type]
        if proven[key]:
            module.forward = _forward(module, epsilon)
            count += 1
    return count


def _epsilon(module: nn.Module) -> float | None:
    """That of a norm of rows; None for other modules."""
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) and [*module.named_parameters()] == [("weight", weight)] else None


@torch.no_grad()
def _is_the_same(module: nn.Module, columns: int, epsilon: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(3, columns, generator=generator) * 3, torch.randn(columns, generator=generator)
    for types in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        source, factor = rows.to(types[0]), weight.to(types[1])
        expected = torch.func.functional_call(module, {"weight": factor}, (source,))
        found, _ = native_rms_norm(source, factor, epsilon)
        if not isinstance(expected, torch.Tensor) or expected.dtype != found.dtype:
            return False
        # Rows whose sum is added up in another order may round to the neighbouring bfloat16 number.
        allowed = 2e-6 if found.dtype == types[0] == torch.float32 else 2**-7
        if not torch.allclose(found, expected, rtol=allowed, atol=1e-6):
            return False
    return True


def _forward(module: nn.Module, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    own = module.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if hidden_states.is_cuda or hidden_states.dtype not in TYPES or weight.dtype not in TYPES:
            computed: torch.Tensor = own(hidden_states)
            return computed
        normal: torch.Tensor = native_rms_norm(hidden_states, weight, epsilon)[0]
        return normal

    return forward
