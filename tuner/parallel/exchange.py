"""Exchanges between processes whose gradients are exchanged, too: each has its true adjoint in the backward pass."""

from collections.abc import Callable
from typing import Any, TypeVarTuple

import torch
import torch.distributed as dist

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
