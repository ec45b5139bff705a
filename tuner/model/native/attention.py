"""Attention inside documents, and rotary position embedding, on the CPU: operations over our kernels in C.

The scores of attention never leave the processor's cache; sums are float32 whatever the inputs are, in an order that
does not depend on the number of threads.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tuner.model import attention_ops as ops
from tuner.model.native import library
from tuner.model.native.library import TYPES
from tuner.model.wrap import Wrapper, names_in, wrap

_ROTATION, _BY_KERNEL = "apply_rotary_pos_emb", "_tuner_rotation_by_kernel"
"""Transformers' name for it in the module of each architecture."""
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@lru_cache(maxsize=64)
def document_bounds(bounds: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """First token and the one after the last of each document, int32 ``[n, 2]``; and the tokens of the longest.

    The longest comes first, so that threads end together.
    """
    found = sorted(
        ((a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a), key=lambda pair: pair[0] - pair[1]
    )
    longest = found[0][1] - found[0][0] if found else 0
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 2), longest


def _call(
    function: str, heads: Sequence[torch.Tensor], asked: ops.Scope, others: dict[str, torch.Tensor],
    sinks: torch.Tensor | None = None,
) -> None:
    """Run one of the kernel's functions over query, key and value ``[heads, T, width]``, each row dense."""
    inputs = dict(zip(ops.NAMES, heads, strict=True))
    query, key, value = heads
    documents, longest = document_bounds(tuple(asked.bounds.tolist()))
    if not longest:
        return
    measure = library.library().attention_scratch
    measure.restype, measure.argtypes = ctypes.c_int64, [ctypes.c_int64] * 4
    scratch_bytes = measure(longest, query.shape[2], value.shape[2], "upstream" in others)
    fields = dict[str, Any](others)
    for name, tensor in inputs.items():
        fields |= {f"{name}_head": tensor.stride(0), f"{name}_token": tensor.stride(1)}
    if "upstream" in others:
        fields["upstream_token"], fields["upstream_head"] = others["upstream"].stride()[:2]
    library.call(
        function, "Attention", **inputs, **fields, sinks=sinks, window=asked.window, scale=asked.scale,
        documents=documents, scratch=torch.empty(library.threads() * scratch_bytes, dtype=torch.uint8),
        scratch_bytes=scratch_bytes, n_documents=len(documents), tokens=query.shape[1], heads=query.shape[0],
        groups=query.shape[0] // key.shape[0], width=query.shape[2], value_width=value.shape[2],
        is_bfloat=query.dtype == torch.bfloat16,
    )


def _output(heads: ops.QueryKeyValue, asked: ops.Scope, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    given = ops.dense(*heads)
    output, normaliser = ops.new_results(*given)
    sinks = None if sink is None else sink.contiguous()
    _call("attention_forward", given, asked, {"output": output, "normaliser": normaliser}, sinks)
    return output, normaliser


def _gradients(upstream: torch.Tensor, heads: ops.QueryKeyValue, made: ops.Results, asked: ops.Scope) -> ops.Gradients:
    query, key, value, upstream = ops.dense(*heads, upstream.to(heads.value.dtype))
    grads, (n_heads, n_tokens, _) = ops.new_gradients(upstream, query, key, value), query.shape
    tensors = {"upstream": upstream, "output": made.output, "normaliser": made.normaliser}
    tensors |= {f"grad_{name}": grad for name, grad in zip(ops.NAMES, grads, strict=True)}
    for name, one in (("key", key), ("value", value)):
        tensors[f"{name}_parts"] = one.new_empty(n_tokens, n_heads, one.shape[2], dtype=torch.float32)
    _call("attention_backward", (query, key, value), asked, tensors)
    return grads


native_attention, _backward = ops.attention_operation(
    "native_attention", "Tensor bounds, int window, float scale", _output, _gradients, ops.LN_2
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
    library.call(
        "rotate", "Rotary", input=source, cosine=cosine, sine=sine, output=output, heads=heads, tokens=tokens,
        width=width, input_head=source.stride(0), input_token=source.stride(1),
        input_is_bfloat=source.dtype == torch.bfloat16, angles_are_bfloat=cosine.dtype == torch.bfloat16,
        output_is_bfloat=dtype == torch.bfloat16, back=back,
    )
    return output.transpose(0, 1)


native_rotary.register_fake(
    lambda source, cosine, sine, dtype, back: (
        source.new_empty(source.shape[1], len(source), source.shape[2], dtype=dtype).transpose(0, 1)
    )
)


def _remember_rotation(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    source, cosine, sine, _, ctx.back = inputs
    ctx.source_type = source.dtype
    ctx.save_for_backward(cosine, sine)


def _differentiate_rotation(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return native_rotary(upstream, *ctx.saved_tensors, ctx.source_type, not ctx.back), None, None, None, None


native_rotary.register_autograd(_differentiate_rotation, setup_context=_remember_rotation)


def apply_native_rotation(model: nn.Module) -> None:
    """Let the model's layers turn queries and keys by the kernel where it is shown to give what theirs gives.

    Such a layer calls its architecture's own function, which gives the kernel's result for random heads and angles.
    That layer alone calls the kernel: the architecture's own function stays as it is.
    """
    for module in model.modules():
        own: Any = type(module).forward
        rotation = getattr(own, "__globals__", {}).get(_ROTATION)
        if _ROTATION not in names_in(own) or rotation is None or "forward" in vars(module):
            continue
        if _is_same_rotation(rotation):
            wrap(module, Wrapper.KERNEL, _calling(own).__get__(module))


@cache
def _calling(own: Any) -> Any:
    """The same function, one for all layers that have it, in which another name stands for the rotation.

    Its module gets that name besides its own. It shares the module's names and has none of its own: the compiler looks
    up there what it guards, and keeps the rest of a function there that it leaves in the middle.
    """
    code = own.__code__
    named = tuple(_BY_KERNEL if name == _ROTATION else name for name in code.co_names)
    own.__globals__[_BY_KERNEL] = _native(own.__globals__[_ROTATION])
    made = FunctionType(code.replace(co_names=named), own.__globals__, own.__name__, own.__defaults__, own.__closure__)
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


@cache
@torch.no_grad()
def _is_same_rotation(rotation: Rotation) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (2, 1))
    angles = [torch.rand(1, 3, 8, generator=generator) for _ in range(2)]
    for heads_type, angles_type in ((TYPES[1], TYPES[1]), (TYPES[0], TYPES[1]), (TYPES[0], TYPES[0])):
        given = (query.to(heads_type), key.to(heads_type), *(angle.to(angles_type) for angle in angles))
        try:
            expected = rotation(*given)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it takes something else
            return False
        allowed = 2e-6 if angles_type == torch.float32 else 2**-6
        pairs = zip(_native(rotation)(*given), expected, strict=True)
        if not all(library.is_same(one, other, allowed, allowed) for one, other in pairs):
            return False
    return True
