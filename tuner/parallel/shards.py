"""How a sharded tensor lies over processes, and whole matrices out of shards where the arithmetic needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Layout:
    """The whole shape of a parameter, and the processes that hold its rows; `group` is None where it is whole here."""

    shape: torch.Size
    group: dist.ProcessGroup | None

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a tensor. Raises ValueError for one that is split otherwise than by rows over one mesh axis."""
        if not isinstance(tensor, DTensor):
            return Layout(tensor.shape, None)
        axes = [axis for axis, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
        if not axes:
            return Layout(tensor.shape, None)
        if len(axes) > 1 or type(tensor.placements[axes[0]]) is not Shard or tensor.placements[axes[0]].dim != 0:  # type: ignore[attr-defined]
            raise ValueError(f"a tensor placed as {tensor.placements} is not split by rows over one axis")
        alone = tensor.device_mesh.size(axes[0]) == 1
        return Layout(tensor.shape, None if alone else tensor.device_mesh.get_group(axes[0]))

    @property
    def rows(self) -> list[int]:
        """How many rows each process of the group holds, as DTensor cuts them."""
        if self.group is None:
            return [self.shape[0]]
        size = dist.get_world_size(self.group)
        step = -(-self.shape[0] // size)
        return [min(step, max(0, self.shape[0] - rank * step)) for rank in range(size)]


def sums_over_rows(sums: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Add up each process's sums of its own rows, all of them in one collective; those of whole tensors stay."""
    group = next((layout.group for layout in layouts if layout.group is not None), None)
    if group is None:
        return list(sums)
    shared = [number for number, layout in enumerate(layouts) if layout.group is not None]
    if any(layouts[number].group is not group for number in shared):
        raise ValueError("parameters are sharded over different groups of processes")
    flat = torch.cat([sums[number].reshape(-1) for number in shared])
    dist.all_reduce(flat, group=group)
    parts = flat.split([sums[number].numel() for number in shared])
    found = list(sums)
    for number, part in zip(shared, parts, strict=True):
        found[number] = part.view_as(sums[number])
    return found


def map_whole_matrices(
    function: Callable[[torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor], layouts: Sequence[Layout]
) -> list[torch.Tensor]:
    """Apply ``function`` to matrices ``[M, N]`` of which each process holds rows; returns its rows of each result.

    The processes take turns: each gathers one matrix of a round, works on it, and sends the rows back, so that no
    matrix is worked on twice. Collective; parts, layouts and their order are the same everywhere, but for the rows.
    """
    found: list[torch.Tensor] = list(parts)
    order = sorted(range(len(parts)), key=lambda number: (-layouts[number].shape.numel(), number))
    for number in (number for number in order if layouts[number].group is None):
        found[number] = function(parts[number])
    shared = [number for number in order if layouts[number].group is not None]
    groups = list(dict.fromkeys(layouts[number].group for number in shared))
    for group in groups:
        numbers = [number for number in shared if layouts[number].group is group]
        size = dist.get_world_size(group)
        for start in range(0, len(numbers), size):
            turn = numbers[start : start + size]
            results = _round(function, [parts[n] for n in turn], [layouts[n] for n in turn], group)
            for number, result in zip(turn, results, strict=True):
                found[number] = result
    return found


def _round(
    function: Callable[[torch.Tensor], torch.Tensor],
    parts: list[torch.Tensor],
    layouts: list[Layout],
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """One matrix for each process of the group, the last ones none where there are fewer."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    if rank < len(parts):
        width = layouts[rank].shape[1]
        received = [rows * width for rows in layouts[rank].rows]
    else:
        received = [0] * size
    outgoing = torch.cat([part.reshape(-1) for part in parts])
    whole = outgoing.new_empty(sum(received))
    dist.all_to_all_single(whole, outgoing, received, sent, group=group)
    if rank < len(parts):
        whole = function(whole.view(layouts[rank].shape)).to(outgoing.dtype).contiguous().view(-1)
    back = torch.empty_like(outgoing)
    dist.all_to_all_single(back, whole, sent, received, group=group)
    return [piece.view_as(part) for piece, part in zip(back.split(sent[: len(parts)]), parts, strict=True)]
