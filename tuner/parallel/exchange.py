"""Exchanges between processes whose gradients are exchanged, too: each has its true adjoint in the backward pass."""

from collections.abc import Callable
from typing import Any, TypeVarTuple

import torch
import torch.distributed as dist

from tuner.parallel.lookup import gather_parts

Group = dist.ProcessGroup
How = TypeVarTuple("How")


def two_way(
    there: Callable[[torch.Tensor, *How], torch.Tensor], back: Callable[[torch.Tensor, *How], torch.Tensor]
) -> Callable[[torch.Tensor, *How], torch.Tensor]:
    """What does one thing to a tensor and another to its gradient; both get what else is given, in order."""

    class TwoWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, *how: *How) -> torch.Tensor:
            ctx.how = how
            return there(given, *how)

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return back(upstream, *ctx.how), *[None] * len(ctx.how)

    def exchange(given: torch.Tensor, /, *how: *How) -> torch.Tensor:
        found: torch.Tensor = TwoWay.apply(given, *how)  # type: ignore[no-untyped-call]
        return found

    return exchange


def sum_over(own: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum in a tensor of its own: what was given may be kept for the backward pass, or be somebody else's."""
    total = own.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def send(rows: torch.Tensor, sent: list[int] | None, received: list[int] | None, group: Group) -> torch.Tensor:
    """Rows ``[N, ...]`` to the processes in order, so many to each, for those received; None: equal parts."""
    count = len(rows) if received is None else sum(received)
    found = rows.new_empty(count, *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


# What processes that compute a layer together exchange: sums and parts of activations, and of their gradients.
#
# Outside the split layers of a block every process of a group has the same numbers, and the whole gradient of each. A
# block is entered by :func:`entered` and left by :func:`summed`, f and g of Megatron-LM (Shoeybi et al. 2019,
# https://arxiv.org/abs/1909.08053); :func:`gathered` and :func:`own_part` stand where a model needs all columns
# between. Each gives the tensor that it gets where there is nothing to add to a gradient, which every process of a
# group sees alike.

def entered(given: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensor itself, of which each process computes a part of what follows: its gradient is the sum of theirs."""
    return _entered(given, group) if given.requires_grad and torch.is_grad_enabled() else given


def _same(given: torch.Tensor, group: Group) -> torch.Tensor:
    return given.view_as(given)


def _join(own: torch.Tensor, group: Group) -> torch.Tensor:
    """All parts ``[..., n]`` along the last dim, in the order of ranks."""
    size = dist.get_world_size(group)
    parts = own.new_empty(size * own.numel())
    gather_parts(parts, own.contiguous().view(-1), group)
    return parts.view(size, *own.shape).movedim(0, -2).flatten(-2)


def _cut(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """This process's equal part of the last dim."""
    width = whole.shape[-1] // dist.get_world_size(group)
    return whole.narrow(-1, dist.get_rank(group) * width, width).contiguous()


_entered = two_way(_same, sum_over)
summed = two_way(sum_over, _same)
"""The sum over processes, with which all compute the same: its gradient is that of each addend."""
gathered = two_way(_join, _cut)
"""All processes' parts ``[..., n]`` as ``[..., n · T]``, with which all compute the same."""
own_part = two_way(_cut, _join)
"""This process's part ``[..., n]`` of ``[..., n · T]``, which all have; the gradient of the whole is gathered."""
