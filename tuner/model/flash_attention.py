"""Flash attention inside documents on CUDA, by torch: one opaque operation that takes heads of any width up to 256.

Torch's own (`varlen_attn`) takes the length of the longest document as a number. Layers would be compiled again for
each number, or be given an upper bound, for which the kernel starts blocks that have nothing to do: with twenty
documents in a row of 4,096, 95 of 100. Here it is a tensor on the CPU, read when the kernel is launched. The kernel
wants one width of all heads, a multiple of 8 (Dao 2023, https://arxiv.org/abs/2307.08691): narrower heads are padded
with zeros, which change neither scores nor the columns that are kept; the backward pass is left the unpadded ones.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad

from tuner.model.attention_ops import new_gradients, new_results, register_backward, with_sinks
from tuner.model.documents import Documents
from tuner.runtime.torch_private import varlen_backward

WIDEST = 256
"""The widest head that the kernel takes."""
TYPES = (torch.bfloat16, torch.float16)
_MULTIPLE = 8
"""Of which the width of a head is one."""
TAKES_TENSOR = varlen_backward() is not None
"""Whether this module's operation is there: it needs the backward pass of torch's as an operation."""
_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's function takes fewer key heads than query heads: not in torch 2.11."""


@torch.library.custom_op("tuner::flash_attention", mutates_args=())
def flash_attention(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: torch.Tensor,
    window: int,
    scale: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[T, heads, d_value]`` of query ``[heads, T, d]`` to key ``[kv_heads, T, d]`` and value.

    All are of one of :data:`TYPES`. ``bounds`` int32 ``[documents + 1]`` lies on their device, ``longest`` int32
    ``[1]`` on the CPU: no document has more tokens. A query sees ``window`` tokens, all before it for 0. A ``sink`` for
    each head, float32 ``[heads]``, is one more score of each query, whose value is zero. The second
    result is for the backward pass: the logarithm of the normaliser, float32 ``[heads, T]``. Raises ValueError for
    what the kernel does not take, on fake tensors too.
    """
    output, normaliser = _run(QueryKeyValue(query, key, value), bounds, int(longest), window, scale)
    if sink is None:
        return output, normaliser
    return with_sinks(output, normaliser, sink)


@flash_attention.register_fake
def _results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _require(query, key, value)
    return new_results(query, key, value)


@torch.library.custom_op("tuner::flash_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    bounds: torch.Tensor,
    longest: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; tokens are their outer dimension in memory, as projections want them."""
    given = QueryKeyValue(query, key, value)
    wide_query, wide_key, wide_value = _taken(given)
    width, most = wide_query.shape[2], int(longest)
    backward = varlen_backward()
    assert backward is not None, "without it this operation is not called"
    grads = backward(
        wide(upstream.to(value.dtype), width),
        wide_query,
        wide_key,
        wide_value,
        wide(output, width),
        normaliser,
        bounds,
        bounds,
        most,
        most,
        window == 0,
        query.new_empty(2, dtype=torch.uint64),  # where dropout would begin to draw: there is none
        scale,
        [window - 1, 0],
    )
    found = [ungrouped(grad, tensor) for grad, tensor in zip(grads, given, strict=True)]
    return found[0], found[1], found[2]


_backward.register_fake(new_gradients)


def _require(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError for heads that filling up does not make fit the kernel."""
    widest, types = max(query.shape[2], value.shape[2]), {tensor.dtype for tensor in (query, key, value)}
    if widest > WIDEST or len(types) != 1 or types.isdisjoint(TYPES):
        found = f"{widest} channels, {', '.join(sorted(map(str, types)))}"
        raise ValueError(f"flash attention takes heads of at most {WIDEST} channels in bf16 or fp16, not {found}")
    if query.shape[2] != key.shape[2] or len(key) != len(value) or len(query) % len(key):
        raise ValueError(f"flash attention: {list(query.shape)} queries do not go with {list(key.shape)} keys")


def with_number(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, window: int, scale: float
) -> torch.Tensor:
    """The first result of :func:`flash_attention` by torch's own operation, for a torch that keeps its parts private.

    The longest document is a constant to the compiler: the longest that there may be.
    """
    return _run(QueryKeyValue(query, key, value), documents.device, documents.bound, window, scale)[0]


class QueryKeyValue(NamedTuple):
    """Query, key and value."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _run(
    given: QueryKeyValue, bounds: torch.Tensor, longest: int, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's function in documents of these bounds and at most so many tokens."""
    _require(given.query, given.key, given.value)
    query, key, value = _taken(given)
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _GROUPS else {}
    output, normaliser = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(window - 1, 0),
        **options,
    )
    return narrow(output, given.value.shape[2]), normaliser


def _taken(given: QueryKeyValue) -> QueryKeyValue:
    """Heads ``[n, T, d]`` as the kernel takes them: ``[T, n, width]``, one width for all that is a multiple of 8."""
    width = -(-max(given.query.shape[2], given.value.shape[2]) // _MULTIPLE) * _MULTIPLE
    query, key, value = (wide(tensor.transpose(0, 1), width) for tensor in given)
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or _GROUPS:
        return QueryKeyValue(query, key, value)
    return QueryKeyValue(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def wide(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Channels filled up with zeros to this width, each head's next to one another in memory."""
    if tensor.shape[-1] < width:
        return pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def ungrouped(grad: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The gradient ``[T, heads, width]`` of what the kernel took as that of what was given, ``[n, T, d]``."""
    if grad.shape[1] != len(given):
        grad = grad.unflatten(1, (len(given), -1)).sum(2)
    return narrow(grad, given.shape[2]).transpose(0, 1)


def narrow(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The first channels, next to one another in memory: without those that were filled up."""
    return tensor.contiguous() if tensor.shape[-1] == width else tensor[..., :width].contiguous()


register_backward(flash_attention, _backward)
