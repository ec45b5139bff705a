"""Causal attention inside documents as blocks of matrix products, for any device: one opaque operation.

A document is worked on in blocks of queries against all keys that they may see; short neighbours share a block, apart
by a mask. Scores and softmax are float32 (float64 for float64). Only query, key and value are kept for the backward
pass, which makes the scores again (Dao et al., 2022). On a CPU, where torch's own kernel for bf16 spends its
time between the products, this is 2 to 3 times faster than calling it for each document.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tuner.model.attention_ops import new_results, register_backward
from tuner.model.documents import Documents
from tuner.runtime.torch_private import softmax_backward

BLOCK_QUERIES = 192
BLOCK_SCORES = 1 << 24
"""Scores of one block over all heads, at most: what bounds memory for long documents."""


class BlockOfKeys(NamedTuple):
    """Queries ``start:end`` see keys ``first:end``; ``mask`` is added to the scores of the last keys."""

    start: int
    end: int
    first: int
    mask: torch.Tensor


@lru_cache(maxsize=16)
def plan_blocks(
    bounds: tuple[int, ...], window: int, heads: int, dtype: torch.dtype, device: torch.device
) -> tuple[BlockOfKeys, ...]:
    """The blocks of documents that end at ``bounds[1:]``; a ``window`` above 0 is the tokens a query sees, itself one.

    Masks are ``[queries, 1, keys]`` with 0 where a query may look and minus infinity elsewhere.
    """
    blocks, bands = [], dict[tuple[int, int], torch.Tensor]()
    for group in _groups(bounds):
        start, end = group[0], group[-1]
        if len(group) > 2:
            document = torch.bucketize(torch.arange(start, end), torch.tensor(group[1:]), right=True)
            allowed = (document[:, None] == document) & band(end - start, end - start, window)
            blocks.append(BlockOfKeys(start, end, start, _mask(allowed, dtype).to(device)))
            continue
        for at, stop in _spans(start, end, heads, window):
            first = max(start, at - window + 1) if window else start
            masked = stop - first if window else stop - at  # keys that some query of the block may not see
            if (stop - at, masked) not in bands:  # one for all blocks of a size, or long rows would be full of masks
                bands[stop - at, masked] = _mask(band(stop - at, masked, window), dtype).to(device)
            blocks.append(BlockOfKeys(at, stop, first, bands[stop - at, masked]))
    return tuple(blocks)


def _mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf).unsqueeze(1)


def _groups(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Documents as bounds, one by one; neighbours that fit one block together as one group."""
    group = [bounds[0]]
    for start, end in zip(bounds, bounds[1:], strict=False):
        if end - group[0] > BLOCK_QUERIES and start > group[0]:
            yield tuple(group)
            group = [start]
        if end > start:
            group.append(end)
    if len(group) > 1:
        yield tuple(group)


def _spans(start: int, end: int, heads: int, window: int) -> Iterator[tuple[int, int]]:
    """Bounds of the blocks of one document: even ones, and fewer queries where many keys are seen."""
    at, even = start, -(-(end - start) // -(-(end - start) // BLOCK_QUERIES))
    while at < end:
        seen = min(at - start, window) if window else at - start
        size = BLOCK_SCORES // (heads * (seen + BLOCK_QUERIES))
        stop = min(end, at + max(8, min(even, size)))
        yield at, stop
        at = stop


def band(queries: int, keys: int, window: int, device: torch.device | None = None) -> torch.Tensor:
    """Boolean ``[queries, keys]``, true where one of the last queries may look: back, fewer than ``window`` tokens."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window) if window else distance >= 0


@torch.library.custom_op("tuner::attend_documents", mutates_args=())
def attend_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float,
    cap: float = 0.0,
) -> torch.Tensor:
    """Attention ``[T, heads, d_value]`` of query ``[heads, T, d]`` to key ``[kv_heads, T, d]`` and value, of one type.

    ``bounds`` int32 ``[documents + 1]`` lies on the CPU. A query sees ``window`` tokens, all before it for 0. A
    ``cap`` above 0 bends scores s to cap·tanh(s/cap).
    """
    work = _Work(query, key, bounds, window, scale, cap)
    of_blocks = zip(work.blocks, work.per_block(work.query), strict=True)
    return work.mix((work.share(block, queries)[0] for block, queries in of_blocks), value)


@torch.library.custom_op("tuner::attend_with_sinks", mutates_args=())
def attend_with_sinks(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, window: int, scale: float,
    cap: float, sink: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a ``sink`` for each head, ``[heads]``: one more score of each query, whose value is zero.

    The second result is the logarithm of the normaliser, ``[heads, T]`` in float32 (float64 for float64), the sink in
    it: from that the backward pass makes the shares.
    """
    work = _Work(query, key, bounds, window, scale, cap)
    normaliser = work.query.new_empty(work.query.shape[:3])
    sinks = sink.to(normaliser.dtype).view(len(key), 1, work.group)

    def shares() -> Iterator[torch.Tensor]:
        normals = normaliser.split(work.sizes, 1)
        for block, queries, normal in zip(work.blocks, work.per_block(work.query), normals, strict=True):
            scores, _ = work.scores(block, queries)
            normal.copy_(torch.logaddexp(torch.logsumexp(scores, -1).unflatten(1, (-1, work.group)), sinks))
            yield scores.sub_(normal.flatten(1, 2).unsqueeze(-1)).exp_()

    return work.mix(shares(), value), normaliser.transpose(1, 2).flatten(0, 1).contiguous()


@torch.library.custom_op("tuner::attend_documents_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    upstream: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor,
    window: int, scale: float, cap: float, normaliser: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, given that of the output; with sinks, by the ``normaliser`` with them."""
    work = _Work(query, key, bounds, window, scale, cap)
    dtype, exact = query.dtype, work.query.dtype
    rounded_query, exact_value = work.query.to(dtype), value.to(exact)
    upstream = upstream.unflatten(1, (key.shape[0], -1)).transpose(0, 1).contiguous()
    grad_query = torch.empty_like(work.query, dtype=dtype)
    grad_key, grad_value = torch.zeros_like(work.key), torch.zeros_like(exact_value)
    of_blocks = (work.query, rounded_query, upstream, upstream.to(exact), grad_query)
    normals = [None] * len(work.blocks) if normaliser is None else work.per_block(work.rows(normaliser))
    with _exact_accumulation(query):
        for block, normal, queries, rounded, up, exact_up, found in zip(
            work.blocks, normals, *map(work.per_block, of_blocks), strict=True
        ):
            seen = block.first, block.end - block.first
            share, bent = work.share(block, queries, normal)
            grad_value.narrow(1, *seen).add_(torch.bmm(share.to(dtype).mT, up))
            grad_share = torch.bmm(exact_up, exact_value.narrow(1, *seen).mT)
            grad_scores = softmax_backward(grad_share, share)
            if bent is not None:
                grad_scores = torch.ops.aten.tanh_backward(grad_scores, bent)
            grad_scores = grad_scores.to(dtype)
            found.copy_(torch.bmm(grad_scores, key.narrow(1, *seen)))
            grad_key.narrow(1, *seen).add_(torch.bmm(grad_scores.mT, rounded))
    grad_query.mul_(scale)
    return grad_query.transpose(1, 2).flatten(0, 1).contiguous(), grad_key.to(dtype), grad_value.to(dtype)


class _Work:
    """Queries ``[kv_heads, T, group, d]``, scaled, and keys ``[kv_heads, T, d]`` in the exact type, and the blocks.

    With the group innermost, the queries of a block lie together: it is a view.
    """

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, bounds: torch.Tensor, window: int, scale: float, cap: float
    ) -> None:
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(0, (key.shape[0], -1)).transpose(1, 2)
        self.query = grouped.to(exact).contiguous() * scale
        self.key, self.cap = key.to(exact), cap
        self.group = self.query.shape[2]
        self.blocks = plan_blocks(tuple(bounds.tolist()), window, query.shape[0], exact, query.device)
        self.sizes = [block.end - block.start for block in self.blocks]

    def per_block(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views ``[kv_heads, queries x group, d]`` of what lies as the queries do, block by block."""
        return tuple(tensor.flatten(1, 2).split([size * self.group for size in self.sizes], 1))

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers ``[heads, T]`` as the queries lie: ``[kv_heads, T, group, 1]``."""
        rows: torch.Tensor = numbers.unflatten(0, (-1, self.group))
        return rows.transpose(1, 2).contiguous().unsqueeze(-1)

    def share(
        self, block: BlockOfKeys, queries: torch.Tensor, normal: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The share of each key in each of the block's queries: ``[kv_heads, queries x group, keys]``.

        And the bent scores over their cap, where there is one. Without normalisers the shares of a query sum to one.
        """
        scores, bent = self.scores(block, queries)
        return (torch.softmax(scores, -1) if normal is None else scores.sub_(normal).exp_()), bent

    def scores(self, block: BlockOfKeys, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What shares are made of, minus infinity where a query may not look; and the bent scores over their cap."""
        scores = torch.bmm(queries, self.key.narrow(1, block.first, block.end - block.first).mT)
        bent = scores.div_(self.cap).tanh_() if self.cap else None
        if bent is not None:
            scores = bent * self.cap
        n_masked = block.mask.shape[-1]
        masked = scores.narrow(-1, scores.shape[-1] - n_masked, n_masked)
        masked.unflatten(1, (-1, self.group)).add_(block.mask)
        return scores, bent

    def mix(self, shares: Iterable[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
        """Values by each block's shares, which are made here one after the other: ``[T, heads, d_value]``."""
        output = value.new_empty(value.shape[1], len(value), self.group, value.shape[2])
        outputs = output.permute(1, 0, 2, 3).split(self.sizes, 1)
        with _exact_accumulation(value):
            for block, share, part in zip(self.blocks, shares, outputs, strict=True):
                mixed = torch.bmm(share.to(value.dtype), value.narrow(1, block.first, block.end - block.first))
                part.copy_(mixed.unflatten(1, (-1, self.group)))
        return output.flatten(1, 2)


@contextmanager
def _exact_accumulation(query: torch.Tensor) -> Iterator[None]:
    """For bf16 inputs: products of float32 copies keep float32 results, whatever precision multiplies inside.

    The copies hold bf16 values, so the CPU may multiply them as such; the result is not rounded to bf16 as that of a
    bf16 product is. For float32 inputs nothing changes.
    """
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    with torch.autocast(query.device.type, enabled=False):
        try:
            if query.dtype == torch.bfloat16:
                products.fp32_precision = "bf16"
            yield
        finally:
            products.fp32_precision = before


attend_documents.register_fake(lambda query, key, value, *_: new_results(query, key, value)[0])
_backward.register_fake(
    lambda up, query, key, value, *_: (query.new_empty(query.shape), torch.empty_like(key), torch.empty_like(value))
)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.window, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_backward(upstream, *ctx.saved_tensors, ctx.window, ctx.scale, ctx.cap), None, None, None, None


attend_documents.register_autograd(_differentiate, setup_context=_remember)


attend_with_sinks.register_fake(new_results)
register_backward(
    attend_with_sinks,
    # The shares are made of the normaliser with the sink in it: the output is what only the sink's gradient needs.
    lambda upstream, query, key, value, output, normaliser, bounds, window, scale, cap: _backward(
        upstream, query, key, value, bounds, window, scale, cap, normaliser
    ),
)


def attend_in_blocks(  # noqa: PLR0913, PLR0917 - what the operations are given
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, window: int, scale: float,
    cap: float, sink: torch.Tensor | None,
) -> torch.Tensor:
    """What the operation gives that takes such sinks, or none."""
    output: torch.Tensor
    if sink is None:
        output = attend_documents(query, key, value, documents.host, window, scale, cap)
    else:
        output, _ = attend_with_sinks(query, key, value, documents.host, window, scale, cap, sink)
    return output
