"""What processes that compute a layer together exchange: sums and parts of activations, and of their gradients.

Outside the split layers of a block every process of a group has the same numbers, and the whole gradient of each. A
block is entered by :func:`entered` and left by :func:`summed`, f and g of Megatron-LM (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053); :func:`gathered` and :func:`own_part` stand where a model needs all columns between.
Each gives the tensor that it gets where there is nothing to add to a gradient, which every process of a group sees
alike.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from tuner.parallel.lookup import gather_parts

Group = dist.ProcessGroup


def entered(given: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensor itself, of which each process computes a part of what follows: its gradient is the sum of theirs."""
    return _applied(_Entered, given, group) if _is_followed(given) else given


def summed(own: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over processes, with which all compute the same: its gradient is that of each addend."""
    return _applied(_Summed, own, group)


def gathered(own: torch.Tensor, group: Group) -> torch.Tensor:
    """All processes' parts ``[..., n]`` as ``[..., n · T]``, with which all compute the same."""
    return _applied(_Gathered, own, group)


def own_part(whole: torch.Tensor, group: Group) -> torch.Tensor:
    """This process's part ``[..., n]`` of ``[..., n · T]``, which all have; the gradient of the whole is gathered."""
    return _applied(_OwnPart, whole, group)


def _is_followed(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _applied(function: type[torch.autograd.Function], tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return cast("Callable[..., torch.Tensor]", function.apply)(tensor, group)


def _sum(own: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum in a tensor of its own: what was given may be kept for the backward pass, or be somebody else's."""
    total = own.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


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


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(upstream, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group) -> torch.Tensor:
        return _sum(own, group)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _join(own, group)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _cut(upstream, ctx.group), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _cut(whole, group)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _join(upstream, ctx.group), None
