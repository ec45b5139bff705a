"""Cross-entropy of a linear output layer without the logits of the whole batch.

Each chunk of positions makes its logits in the type of the products, turns them into their gradient in place, and
forgets them before the next chunk starts (the method of Liger Kernel, https://arxiv.org/abs/2410.10989, in plain torch
operations). Normaliser, loss and the step from logits to gradient are float32, a few rows at a time. The weight is
converted, and its gradient added up, a block of the vocabulary at a time: neither has a second copy of its size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tuner.model.logit_transform import PLAIN, LogitTransform
from tuner.model.target import target

Kernel = Callable[[torch.Tensor, torch.Tensor, bool, torch.Tensor | None], torch.Tensor]
"""From logits ``[N, V]``, targets ``[N]``, whether the logits become their gradient in place, and weights float32
``[N]`` of the positions, or None for ones, to the summed loss."""
CHUNK_LOGITS = 1 << 27
"""Logits of one chunk, at most: what bounds memory. Large, since every chunk adds to the gradient of the weight."""
BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Logits in float32 at one time: what fits a processor's cache, or fills a GPU."""
BLOCK_VOCABULARY = {"cpu": 1 << 12, "cuda": 1 << 14}
"""Rows of the weight in one product: on a processor its converted rows, and their gradient, stay in the cache."""


@dataclass(frozen=True)
class _Head:
    """An output layer and its input: hidden ``[N, D]``, weight ``[V, D]``, bias ``[V]``, the type of the products."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    def sweep(
        self, targets: torch.Tensor, weights: torch.Tensor | None, kernel: Kernel, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The summed loss, and its gradients by hidden, weight and bias, None where not ``wanted``; chunk by chunk."""
        hidden, weight, exact_dtype = self.hidden, self.weight, torch.promote_types(self.dtype, torch.float32)
        grad_hidden = torch.zeros_like(hidden, dtype=exact_dtype) if wanted[0] else None
        grad_weight = (torch.empty_like if len(hidden) else torch.zeros_like)(weight) if wanted[1] else None
        grad_bias = torch.zeros_like(self.bias) if wanted[2] and self.bias is not None else None
        loss = torch.zeros((), dtype=exact_dtype, device=hidden.device)
        for span in _spans(len(hidden), max(1, CHUNK_LOGITS // len(weight))):
            rows = hidden[span].to(self.dtype)
            logits = _products(rows, weight, self.bias)
            loss += kernel(logits, targets[span], any(wanted), _part(weights, span))
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=exact_dtype)
            for block in _blocks(weight):
                share = logits[:, block]
                if grad_hidden is not None:
                    grad_hidden[span] += share @ weight[block].to(self.dtype)
                if grad_weight is not None:
                    product = share.T @ rows
                    grad_weight[block].copy_(product) if span.start == 0 else grad_weight[block].add_(product)
        return loss, [None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        kernel: Kernel,
    ) -> torch.Tensor:
        head = _Head(hidden, weight, bias, _dtype(hidden))
        loss, gradients = head.sweep(targets, weights, kernel, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place: a second backward through the same loss is refused by autograd.
        scaled = [None if g is None else g.mul_(upstream) for g in ctx.saved_tensors]
        return (*scaled, None, None, None)


class _PositionLosses(torch.autograd.Function):
    """Forgets the logits, and makes them again in the backward pass, where each position's share of it is known."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        kernel: Kernel,
    ) -> torch.Tensor:
        dtype = _dtype(hidden)
        losses = torch.empty(len(targets), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
        for span in _spans(len(hidden), max(1, CHUNK_LOGITS // len(weight))):
            logits, wanted, found = _products(hidden[span].to(dtype), weight, bias), targets[span], losses[span]
            transform.apply_(logits)
            for block in _spans(len(logits), max(1, BLOCK_LOGITS[target(logits)] // len(weight))):
                exact = logits[block].to(losses.dtype)
                found[block] = torch.logsumexp(exact, -1) - exact.gather(1, wanted[block, None])[:, 0]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.dtype, ctx.kernel = dtype, transformed(kernel, transform)
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.dtype)
        _, gradients = head.sweep(targets, upstream, ctx.kernel, ctx.needs_input_grad[:3])
        return (*gradients, None, None, None)


def _dtype(hidden: torch.Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _part(weights: torch.Tensor | None, span: slice) -> torch.Tensor | None:
    return None if weights is None else weights[span]


def _spans(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


def _blocks(weight: torch.Tensor) -> Iterator[slice]:
    return _spans(len(weight), BLOCK_VOCABULARY[target(weight)])


def _products(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The output layer of rows ``[N, D]``, in their type: ``[N, V]``."""
    products = rows.new_empty(len(rows), len(weight))
    for block in _blocks(weight):
        torch.mm(rows, weight[block].to(rows.dtype).T, out=products[:, block])
    if bias is not None:
        products += bias
    return products


def softmax_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed loss, a float32 scalar; ``logits`` become its gradient where that is wanted. A few rows at a time."""
    exact_dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=exact_dtype, device=logits.device)
    for block in _spans(len(logits), max(1, BLOCK_LOGITS[target(logits)] // logits.shape[1])):
        exact = logits[block].to(exact_dtype)
        wanted = targets[block, None]
        share = torch.softmax(exact, -1)
        # The largest share is 1 over the normaliser, from the largest logit: one pass less than logsumexp needs.
        log_normaliser = exact.amax(-1, keepdim=True) - share.amax(-1, keepdim=True).log()
        losses = log_normaliser - exact.gather(1, wanted)
        total += (losses if weights is None else losses * weights[block, None]).sum()
        if wants_gradient:
            share.scatter_add_(1, wanted, share.new_full(wanted.shape, -1.0))
            logits[block] = share if weights is None else share.mul_(weights[block, None])
    return total


def transformed(kernel: Kernel, transform: LogitTransform) -> Kernel:
    """The kernel for a model that does not take the products as they are."""

    def run(
        products: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None
    ) -> torch.Tensor:
        tanh = transform.apply_(products)
        loss = kernel(products, targets, wants_gradient, weights)
        if wants_gradient:
            transform.backward_(products, tanh)
        return loss

    return kernel if transform == PLAIN else run


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    kernel: Kernel = softmax_into_gradient,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies in nats, a scalar; zero, with a gradient of zeros, for no positions.

    Shapes: hidden ``[N, D]``, weight ``[V, D]``, bias ``[V]``, targets int64 ``[N]``, none of them ignored, and
    ``weights`` float32 ``[N]`` by which each position counts, None for ones; they get no gradient. The products run in
    autocast's type where autocast is on; normaliser and loss are float32 (float64 for float64 inputs).
    """
    if not torch.is_grad_enabled():  # the function would still see parameters that want a gradient, and make it
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, weights, kernel)  # type: ignore[no-untyped-call]
    return loss


def position_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform = PLAIN,
    kernel: Kernel = softmax_into_gradient,
) -> torch.Tensor:
    """The cross-entropy in nats at each position, ``[N]``, of the same products and types as those of their sum.

    Shapes as for :func:`linear_cross_entropy`. For losses that are no sum over positions, such as those of whole
    documents: a backward pass computes the logits a second time, by ``kernel``, and never keeps them.
    """
    losses: torch.Tensor = _PositionLosses.apply(hidden, weight, bias, targets, transform, kernel)  # type: ignore[no-untyped-call]
    return losses
