"""Flash attention inside documents on CUDA, by torch: one opaque operation that takes heads of any width up to 256.

Torch's own (`varlen_attn`) takes the length of the longest document as a number. Layers would be compiled again for
each number, or be given an upper bound, for which the kernel starts blocks that have nothing to do: with twenty
documents in a row of 4,096, 95 of 100. Here it is a tensor on the CPU, read when the kernel is launched. The kernel
wants one width of all heads, a multiple of 8 (Dao 2023, https://arxiv.org/abs/2307.08691): narrower heads are padded
with zeros, which change neither scores nor the columns that are kept; the backward pass is left the unpadded ones.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad

from tuner.model import attention_ops as ops
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


def _output(heads: ops.QueryKeyValue, asked: ops.Scope, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError for what the kernel does not take."""
    output, normaliser = _run(heads, asked.bounds, int(asked.longest), asked.window, asked.scale)
    return (output, normaliser) if sink is None else ops.with_sinks(output, normaliser, sink)


def _gradients(upstream: torch.Tensor, heads: ops.QueryKeyValue, made: ops.Results, asked: ops.Scope) -> ops.Gradients:
    query, key, value = _taken(heads)
    width, most = query.shape[2], int(asked.longest)
    backward = varlen_backward()
    assert backward is not None, "without it this operation is not called"
    undrawn = query.new_empty(2, dtype=torch.uint64)  # where dropout would begin to draw: there is none
    grads = backward(
        wide(upstream.to(heads.value.dtype), width), query, key, value, wide(made.output, width), made.normaliser,
        *(asked.bounds, asked.bounds, most, most),  # of queries and of keys
        asked.window == 0, undrawn, asked.scale, [asked.window - 1, 0],
    )
    found = [ungrouped(grad, tensor) for grad, tensor in zip(grads, heads, strict=True)]
    return found[0], found[1], found[2]


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
    return _run(ops.QueryKeyValue(query, key, value), documents.device, documents.bound, window, scale)[0]


def _run(
    given: ops.QueryKeyValue, bounds: torch.Tensor, longest: int, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's function in documents of these bounds and at most so many tokens."""
    _require(given.query, given.key, given.value)
    query, key, value = _taken(given)
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _GROUPS else {}
    output, normaliser = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, return_aux=AuxRequest(lse=True), scale=scale,
        window_size=(window - 1, 0), **options,
    )
    return narrow(output, given.value.shape[2]), normaliser


def _taken(given: ops.QueryKeyValue) -> ops.QueryKeyValue:
    """Heads ``[n, T, d]`` as the kernel takes them: ``[T, n, width]``, one width for all that is a multiple of 8."""
    width = -(-max(given.query.shape[2], given.value.shape[2]) // _MULTIPLE) * _MULTIPLE
    query, key, value = (wide(tensor.transpose(0, 1), width) for tensor in given)
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or _GROUPS:
        return ops.QueryKeyValue(query, key, value)
    return ops.QueryKeyValue(query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


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


flash_attention, _backward = ops.attention_operation(
    "flash_attention", "Tensor bounds, Tensor longest, int window, float scale", _output, _gradients
)


@flash_attention.register_fake  # type: ignore[untyped-decorator]
def _results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _require(query, key, value)  # of fake tensors, too
    return ops.new_results(query, key, value)
