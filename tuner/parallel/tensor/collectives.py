"""What processes that compute a layer together exchange: sums and parts of activations, and of their gradients.

Outside the split layers of a block every process of a group has the same numbers, and the whole gradient of each. A
block is entered by :func:`entered` and left by :func:`summed`, f and g of Megatron-LM (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053); :func:`gathered` and :func:`own_part` stand where a model needs all columns between.
Each gives the tensor that it gets where there is nothing to add to a gradient, which every process of a group sees
alike.
"""

import torch
import torch.distributed as dist

from tuner.parallel.exchange import Group, sum_over, two_way
from tuner.parallel.lookup import gather_parts


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
