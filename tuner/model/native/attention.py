"""Causal attention inside documents on the CPU: one operation over our kernel in C (attention.c).

The tiles' scores never leave the processor's cache; sums are float32 whatever the inputs are, in an order that does
not depend on the number of threads.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch

from tuner.model.native.library import library, threads

TYPES = (torch.bfloat16, torch.float32)
"""What the kernel takes."""
_POINTERS = (
    "query", "key", "value", "upstream", "output", "normaliser", "grad_query", "grad_key", "grad_value", "key_parts",
    "value_parts", "scratch", "documents",
)  # fmt: skip
_NUMBERS = (
    "scratch_bytes", "n_documents", "tokens", "heads", "groups", "width", "value_width", "window", "is_bfloat",
    "threads", "query_head", "query_token", "key_head", "key_token", "value_head", "value_token", "upstream_head",
    "upstream_token",
)  # fmt: skip


class _Call(ctypes.Structure):
    """`Attention` of attention.c: strides count numbers, not bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_double),
    )


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


def _call(function: str, inputs: tuple[torch.Tensor, ...], others: dict[str, torch.Tensor], **numbers: Any) -> None:
    """Run one of the kernel's functions over inputs ``[heads, T, width]`` whose last dimension is dense."""
    query, key, value = inputs
    documents, longest = document_bounds(tuple(numbers.pop("bounds").tolist()))
    if not longest:
        return
    measure = library().attention_scratch
    measure.restype, measure.argtypes = ctypes.c_int64, [ctypes.c_int64] * 4
    scratch_bytes = measure(longest, query.shape[2], value.shape[2], "upstream" in others)
    scratch = torch.empty(threads() * scratch_bytes, dtype=torch.uint8)
    named = {"query": query, "key": key, "value": value, "documents": documents, "scratch": scratch, **others}
    call = _Call(
        scratch_bytes=scratch_bytes,
        n_documents=len(documents),
        tokens=query.shape[1],
        heads=query.shape[0],
        groups=query.shape[0] // key.shape[0],
        width=query.shape[2],
        value_width=value.shape[2],
        is_bfloat=query.dtype == torch.bfloat16,
        threads=threads(),
        **{name: tensor.data_ptr() for name, tensor in named.items()},
        **numbers,
    )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        setattr(call, f"{name}_head", tensor.stride(0))
        setattr(call, f"{name}_token", tensor.stride(1))
    if "upstream" in others:
        call.upstream_token, call.upstream_head = others["upstream"].stride()[:2]
    getattr(library(), function)(ctypes.byref(call))


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


@torch.library.custom_op("tuner::native_attention", mutates_args=())
def native_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[T, heads, d_value]`` of query ``[heads, T, d]`` to key ``[kv_heads, T, d]`` and value.

    All are of one of :data:`TYPES`. ``bounds`` int32 ``[documents + 1]``: a query sees its own document's tokens before
    it, ``window`` of them, all for 0. The second result, float32 ``[heads, T]``, is for the backward pass: the binary
    logarithm of the normaliser.
    """
    query, key, value = _dense(query, key, value)
    heads, n_tokens, _ = query.shape
    output = value.new_empty(n_tokens, heads, value.shape[2])
    normaliser = query.new_empty(heads, n_tokens, dtype=torch.float32)
    results = {"output": output, "normaliser": normaliser}
    _call("attention_forward", (query, key, value), results, bounds=bounds, window=window, scale=scale)
    return output, normaliser


@torch.library.custom_op("tuner::native_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    bounds: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; tokens are their outer dimension in memory, as projections want them."""
    query, key, value, upstream = _dense(query, key, value, upstream.to(value.dtype))
    heads, n_tokens, _ = query.shape
    tensors = {"upstream": upstream, "output": output, "normaliser": normaliser}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        tensors[f"grad_{name}"] = tensor.new_empty(n_tokens, len(tensor), tensor.shape[2])
    for name, tensor in (("key", key), ("value", value)):
        tensors[f"{name}_parts"] = query.new_empty(n_tokens, heads, tensor.shape[2], dtype=torch.float32)
    _call("attention_backward", (query, key, value), tensors, bounds=bounds, window=window, scale=scale)
    grads = [tensors[f"grad_{name}"].transpose(0, 1) for name in ("query", "key", "value")]
    return grads[0], grads[1], grads[2]


@native_attention.register_fake
def _shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, n_tokens, _ = query.shape
    return value.new_empty(n_tokens, heads, value.shape[2]), query.new_empty(heads, n_tokens, dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(  # noqa: PLR0913, PLR0917
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    bounds: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = [tensor.new_empty(query.shape[1], len(tensor), tensor.shape[2]) for tensor in (query, key, value)]
    return grads[0].transpose(0, 1), grads[1].transpose(0, 1), grads[2].transpose(0, 1)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, bounds, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_backward(upstream, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None


native_attention.register_autograd(_differentiate, setup_context=_remember)
