"""Rotary position embedding on the CPU: one operation over our kernel in C (rotary.c), and the layers that take it."""

import ctypes
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tuner.model.native.library import library, threads

TYPES = (torch.bfloat16, torch.float32)
"""What the kernel takes."""
_FUNCTION = "apply_rotary_pos_emb"
"""Transformers' name for it in the module of each architecture."""
_NUMBERS = (
    "heads", "tokens", "width", "input_head", "input_token", "input_is_bfloat", "angles_are_bfloat",
    "output_is_bfloat", "back", "threads",
)  # fmt: skip
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _Call(ctypes.Structure):
    """`Rotary` of rotary.c: strides count numbers, not bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "cosine", "sine", "output")),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


@torch.library.custom_op("tuner::native_rotary", mutates_args=())
def native_rotary(
    source: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype, back: bool
) -> torch.Tensor:
    """``source`` ``[heads, T, d]`` turned by angles whose cosines and sines are ``[T, d]``, in ``dtype``.

    All are of one of :data:`TYPES`, computed in float32 and rounded once. ``back`` is the transposed operation, which
    is the gradient's. Tokens are the result's outer dimension in memory.
    """
    source = source if source.stride(-1) == 1 else source.contiguous()
    cosine, sine = cosine.contiguous(), sine.contiguous()
    heads, tokens, width = source.shape
    output = source.new_empty(tokens, heads, width, dtype=dtype)
    call = _Call(
        input=source.data_ptr(),
        cosine=cosine.data_ptr(),
        sine=sine.data_ptr(),
        output=output.data_ptr(),
        heads=heads,
        tokens=tokens,
        width=width,
        input_head=source.stride(0),
        input_token=source.stride(1),
        input_is_bfloat=source.dtype == torch.bfloat16,
        angles_are_bfloat=cosine.dtype == torch.bfloat16,
        output_is_bfloat=dtype == torch.bfloat16,
        back=back,
        threads=threads(),
    )
    library().rotate(ctypes.byref(call))
    return output.transpose(0, 1)


@native_rotary.register_fake
def _shapes(
    source: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype, back: bool
) -> torch.Tensor:
    heads, tokens, width = source.shape
    return source.new_empty(tokens, heads, width, dtype=dtype).transpose(0, 1)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    source, cosine, sine, _, ctx.back = inputs
    ctx.source_type = source.dtype
    ctx.save_for_backward(cosine, sine)


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return native_rotary(upstream, *ctx.saved_tensors, ctx.source_type, not ctx.back), None, None, None, None


native_rotary.register_autograd(_differentiate, setup_context=_remember)


def apply_native_rotation(model: nn.Module) -> int:
    """Let the model's layers turn queries and keys by the kernel where it is shown to give what theirs gives.

    Returns how many. A layer counts that calls its architecture's own function, which gives the kernel's result for
    random heads and angles. That layer alone calls the kernel: the architecture's module stays as it is.
    """
    proven: dict[int, bool] = {}
    count = 0
    for module in model.modules():
        own: Any = type(module).forward
        names = getattr(getattr(own, "__code__", None), "co_names", ())
        rotation = getattr(own, "__globals__", {}).get(_FUNCTION)
        if _FUNCTION not in names or rotation is None or "forward" in vars(module):
            continue
        if id(rotation) not in proven:
            proven[id(rotation)] = _is_the_same(rotation)
        if proven[id(rotation)]:
            module.forward = _calling(own, _native(rotation)).__get__(module)
            count += 1
    return count


def _calling(own: Any, rotation: Rotation) -> Any:
    """The same function, to which the name means another rotation."""
    made = FunctionType(
        own.__code__, {**own.__globals__, _FUNCTION: rotation}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__ = own.__kwdefaults__
    return made


def _native(own: Rotation) -> Rotation:
    def rotation(*given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if options or len(given) != len(("query", "key", "cosine", "sine")) or not _serves(*given):
            return own(*given, **options)
        query, key, cosine, sine = given
        turned = [_turned(heads, cosine, sine) for heads in (query, key)]
        return turned[0], turned[1]

    return rotation


def _serves(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
    """Whether these are heads ``[1, heads, T, d]`` and angles ``[1, T, d]`` that the kernel takes."""
    angles = cosine.shape == sine.shape == (1, query.shape[-2], query.shape[-1]) and query.shape[-1] % 2 == 0
    heads = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] == 1 and query.shape[2:] == key.shape[2:]
    types = cosine.dtype == sine.dtype and all(t.dtype in TYPES and not t.is_cuda for t in (query, key, cosine))
    return angles and heads and types


def _turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """In autocast's type where autocast is on: attention would round it to that."""
    dtype = torch.promote_types(heads.dtype, cosine.dtype)
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in TYPES:
        dtype = torch.get_autocast_dtype("cpu")
    turned: torch.Tensor = native_rotary(heads[0], cosine[0], sine[0], dtype, False)
    return turned[None]


@torch.no_grad()
def _is_the_same(rotation: Rotation) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    angles = [torch.rand(1, 3, 8, generator=generator) for _ in range(2)]
    for heads_type, angles_type in ((TYPES[1], TYPES[1]), (TYPES[0], TYPES[1]), (TYPES[0], TYPES[0])):
        given = (query.to(heads_type), key.to(heads_type), *(angle.to(angles_type) for angle in angles))
        try:
            expected = rotation(*given)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes something else
            return False
        found = _native(rotation)(*given)
        allowed = 2e-6 if angles_type == torch.float32 else 2**-6
        for one, other in zip(found, expected, strict=True):
            if one.dtype != other.dtype or not torch.allclose(one, other, rtol=allowed, atol=allowed):
                return False
    return True
