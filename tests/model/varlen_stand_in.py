"""CPU kernels for torch's flash attention over documents, which refuse what FlashAttention 2 refuses.

Imported, they are there: with `traced_for("cuda")` the branch of CUDA runs on tensors of the CPU. They compute by the
blocks of products, so that a model's numbers are those of the CPU branch. What they demand is what `mha_varlen_fwd` and
`mha_varlen_bwd` check in torch's `flash_api.cpp`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import varlen

from tuner.model import blocked_attention


@dataclass(frozen=True)
class Call:
    """One launch: forward or backward, the bound it was told and the longest document, its window and width."""

    which: str
    bound: int
    longest: int
    window: int
    width: int


CALLS: list[Call] = []


def _check(which: str, tensors: tuple[torch.Tensor, ...], bounds: tuple[Any, ...], window: list[int]) -> None:
    query, key, value, *others = tensors
    (of_queries, of_keys), (bound, other) = bounds[:2], bounds[2:]
    assert {tensor.dtype for tensor in tensors} in ({torch.bfloat16}, {torch.float16}), "bf16 or fp16, all alike"
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "last dimension contiguous"
    total, heads, width = query.shape
    assert key.shape == value.shape == (total, key.shape[1], width), "one width of query, key and value"
    assert all(tensor.shape == query.shape for tensor in others)
    assert width % 8 == 0 and width <= 256, f"head size {width}"
    assert heads % key.shape[1] == 0, "heads of queries are a multiple of those of keys"
    for one in (of_queries, of_keys):
        assert one.dtype == torch.int32 and one.is_contiguous() and one.dim() == 1 and len(one) > 1
        assert one[0] == 0 and one[-1] == total
    longest = int(of_queries.diff().max())
    assert type(bound) is int and bound == other and bound >= longest, "a bound of the longest document"
    assert window[1] == 0 and window[0] >= -1, "causal"
    CALLS.append(Call(which, bound, longest, window[0] + 1, width))


def _forward(*given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _FORWARD.bind(*given, **options).arguments
    query, key, value, scale, window = _checked("forward", call, ("query", "key", "value"))
    assert call.get("enable_gqa") or query.shape[1] == key.shape[1]
    unused = ("seqused_k", "block_table", "num_splits", "k_cache", "v_cache", "page_table")
    assert all(call.get(name) is None for name in unused)
    none = torch.full((query.shape[1],), -torch.inf)
    given = (*_heads(query, key, value), call["cu_seq_q"], window, scale, 0.0, none)
    found, normaliser = blocked_attention.attend_with_sinks(*given)
    return torch.empty_like(query).copy_(found), normaliser, torch.zeros(2, dtype=torch.uint64)


def _backward(*given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    call = _BACKWARD.bind(*given, **options).arguments
    query, key, value, scale, window = _checked("backward", call, ("query", "key", "value", "grad_out", "out"))
    assert call["lse"].dtype == torch.float32 and call["lse"].shape == (query.shape[1], len(query))
    assert call["rng_state"].dtype == torch.uint64 and call["rng_state"].shape == (2,)
    heads, upstream = _heads(query, key, value), call["grad_out"]
    given = (upstream, *heads, call["cu_seq_q"], window, scale, 0.0, call["lse"])
    grads = blocked_attention._backward(*given)
    pairs = zip((query, key, value), grads, strict=True)
    return tuple(torch.empty_like(tensor).copy_(grad.transpose(0, 1)) for tensor, grad in pairs)


def _checked(which: str, call: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Query, key, value, scale and tokens that a query sees, of a call that the kernel takes."""
    tensors = tuple(call[name] for name in names)
    bounds = tuple(call[name] for name in ("cu_seq_q", "cu_seq_k", "max_q", "max_k"))
    window = call["window_size"]
    _check(which, tensors, bounds, window)
    assert call["scale"] is not None and call["is_causal"] == (list(window) == [-1, 0])
    return *tensors[:3], call["scale"], window[0] + 1


def _heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.transpose(0, 1) for tensor in tensors]


_FORWARD = inspect.signature(varlen._varlen_attn._init_fn)
_BACKWARD = inspect.signature(varlen._varlen_attn_backward._init_fn)
varlen._varlen_attn.register_kernel("cpu", _forward)
varlen._varlen_attn_backward.register_kernel("cpu", _backward)
