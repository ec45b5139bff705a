"""Arithmetic over parameters of which each process has a part: sums over what is split, and work on whole matrices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tuner.parallel.lookup import gather_parts
from tuner.runtime.parts import TensorPart, cuts_of, part_at, part_of, pieces_of


class AxisSplit(NamedTuple):
    """A dimension of a parameter that an axis of its mesh splits, and the processes along it that this one is among."""

    dim: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class ShardLayout:
    """The whole shape of a parameter and how it is split; without splits it is whole here."""

    shape: torch.Size
    splits: tuple[AxisSplit, ...] = ()
    group: dist.ProcessGroup | None = None
    """The processes that have the parameter between them, this one included."""
    parts: tuple[TensorPart, ...] = ()
    """What each process of that group has, by its rank there."""

    @property
    def own(self) -> TensorPart:
        """What this process has."""
        return self.parts[dist.get_rank(self.group)] if self.splits else part_at(tuple(self.shape), (), (), ())


Layouts = Mapping[torch.Tensor, ShardLayout]
"""How parameters lie, each by what a process holds of it."""
Groups = dict[tuple[DeviceMesh, tuple[int, ...]], dist.ProcessGroup]


def layouts_of(parameters: Iterable[torch.Tensor]) -> list[ShardLayout]:
    """The layouts of parameters, the same ones in the same order on all processes.

    Collective where several axes of a mesh split one parameter: their processes become a group. Raises ValueError for a
    parameter that is a sum over processes.
    """
    joined: Groups = {}
    return [_layout(parameter, joined) for parameter in parameters]


def _layout(tensor: torch.Tensor, joined: Groups) -> ShardLayout:
    if not isinstance(tensor, DTensor):
        return ShardLayout(tensor.shape)
    mesh, cuts = tensor.device_mesh, cuts_of(tensor)
    split = {axis: cut.dim for axis, cut in enumerate(cuts) if cut is not None and mesh.size(axis) > 1}
    if not split:
        return ShardLayout(tensor.shape)
    splits = tuple(AxisSplit(dim, mesh.get_group(axis)) for axis, dim in split.items())
    axes = tuple(split)
    if (mesh, axes) not in joined:
        joined[mesh, axes] = splits[0].group if len(splits) == 1 else _joined(mesh, axes)
    place = mesh.get_coordinate()
    assert place is not None, "every process of a run is in the meshes of its own tensors"
    parts = []
    for others in product(*(range(mesh.size(axis)) for axis in axes)):
        theirs = dict(enumerate(place)) | dict(zip(axes, others, strict=True))
        parts.append(part_at(tuple(tensor.shape), tuple(mesh.shape), cuts, tuple(theirs.values())))
    return ShardLayout(tensor.shape, splits, joined[mesh, axes], tuple(parts))


def _joined(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The processes that differ from this one along these axes alone. Collective over all of a launch.

    In whole numbers: where a step is predicted, a mesh's own tensor has none.
    """
    steps, first = [], dist.get_rank()
    for axis, index in enumerate(mesh.get_coordinate() or ()):
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        steps.append(ranks[1] - ranks[0] if len(ranks) > 1 else 0)
        first -= index * steps[-1]
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    groups = [
        [
            first + sum(index * steps[axis] for axis, index in zip((*others, *axes), (*out, *own), strict=True))
            for own in product(*(range(mesh.size(axis)) for axis in axes))
        ]
        for out in product(*(range(mesh.size(axis)) for axis in others))
    ]
    in_order = all(group == sorted(group) for group in groups)  # as torch has them, whatever order is asked for
    if not in_order or sorted(rank for group in groups for rank in group) != list(range(dist.get_world_size())):
        raise ValueError(f"a parameter lies over {mesh}, which is not all processes in order")
    found, _ = dist.new_subgroups_by_enumeration(groups)
    return cast("dist.ProcessGroup", found)


def added_up(
    sums: Sequence[torch.Tensor], layouts: Sequence[ShardLayout], dims: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Add up what the processes have of sums over their own elements; what is whole along those dimensions stays.

    ``dims`` has for each sum the dimension of the parameter that was summed over; without it, over all of them. One
    collective for each axis of a mesh.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for number, layout in enumerate(layouts):
        for split in layout.splits:
            if dims is None or split.dim == dims[number]:
                groups.setdefault(split.group, []).append(number)
    found = list(sums)
    for group, numbers in groups.items():
        flat = torch.cat([found[number].reshape(-1) for number in numbers])
        dist.all_reduce(flat, group=group)
        parts = flat.split([found[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view_as(sums[number])
    return found


def map_whole_matrices(
    function: Callable[[torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor], layouts: Sequence[ShardLayout]
) -> list[torch.Tensor]:
    """Apply ``function`` to matrices of which each process has a part; returns its part of each result.

    The processes take turns: each gathers one matrix of a round, works on it, and sends the parts back, so that no
    matrix is worked on twice. Collective; layouts and their order are the same everywhere.
    """
    found: list[torch.Tensor] = list(parts)
    order = sorted(range(len(parts)), key=lambda number: (-layouts[number].shape.numel(), number))
    shared: dict[dist.ProcessGroup, list[int]] = {}
    for number in order:
        if (group := layouts[number].group) is None:
            found[number] = function(parts[number])
        else:
            shared.setdefault(group, []).append(number)
    for group, numbers in shared.items():
        size = dist.get_world_size(group)
        for start in range(0, len(numbers), size):
            turn = numbers[start : start + size]
            results = _round(function, [parts[n] for n in turn], [layouts[n] for n in turn], group)
            for number, result in zip(turn, results, strict=True):
                found[number] = result
    return found


def _round(
    function: Callable[[torch.Tensor], torch.Tensor], parts: list[torch.Tensor], layouts: list[ShardLayout],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """One matrix for each process of the group, the last ones none where there are fewer."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    received = [0] * size
    if rank < len(parts):
        received = [torch.Size(part.shape).numel() for part in layouts[rank].parts]
    outgoing = torch.cat([part.reshape(-1) for part in parts])
    pieces = outgoing.new_empty(sum(received))
    dist.all_to_all_single(pieces, outgoing, received, sent, group=group)
    if rank < len(parts):
        layout, dtype = layouts[rank], outgoing.dtype
        if _in_order(layout):
            pieces = function(pieces.view(layout.shape)).to(dtype).contiguous().view(-1)
        else:
            whole = _whole_of(pieces.split(received), layout)
            pieces = torch.cat(_parts_of(function(whole).to(dtype), layout))
    back = torch.empty_like(outgoing)
    dist.all_to_all_single(back, pieces, sent, received, group=group)
    return [piece.view_as(part) for piece, part in zip(back.split(sent[: len(parts)]), parts, strict=True)]


def _in_order(layout: ShardLayout) -> bool:
    """Whether the parts of a matrix, end to end, are the matrix: whole rows, in the order of the processes."""
    at = 0
    for part in layout.parts:
        if len(part.boxes) > 1 or any(box.offsets[0] != at or box.sizes[1:] != layout.shape[1:] for box in part.boxes):
            return False
        at += part.shape[0] if part.boxes else 0
    return True


def _whole_of(pieces: Sequence[torch.Tensor], layout: ShardLayout) -> torch.Tensor:
    whole = pieces[0].new_empty(layout.shape)
    for piece, part in zip(pieces, layout.parts, strict=True):
        for box in part.boxes:
            box.of(whole).copy_(box.within(piece.view(part.shape)))
    return whole


def _parts_of(whole: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """The parts of all processes, one after the other, each laid flat."""
    found = []
    for part in layout.parts:
        own = whole.new_empty(part.shape)
        for box in part.boxes:
            box.within(own).copy_(box.of(whole))
        found.append(own.view(-1))
    return found


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every process. Collective over those that have it between them.

    torch's ``full_tensor`` goes from axis to axis, and does not know every order of strided ones. Here each process
    puts its own elements into zeros, and whole bytes are added up: every element keeps its bits.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor.to_local()
    found = part.new_zeros(tensor.shape)
    for box in part_of(tensor).boxes:
        box.of(found).copy_(box.within(part))
    raw = found.view(-1).view(torch.uint8)
    for axis, cut in enumerate(cuts_of(tensor)):
        if cut is not None and tensor.device_mesh.size(axis) > 1:
            dist.all_reduce(raw, group=tensor.device_mesh.get_group(axis))
    return found


@torch.no_grad()
def along(part: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """What the processes of a group have between them of a tensor whose ``dim``, of this size, they cut as FSDP2 does.

    Collective.
    """
    count, index = dist.get_world_size(group), dist.get_rank(group)
    pieces = pieces_of(size, count)
    rows = part.movedim(dim, 0)
    assert len(rows) == len(pieces[index]), "the processes have all of it between them"
    filled = rows.new_zeros(len(pieces[0]), *rows.shape[1:])
    filled[: len(rows)].copy_(rows)
    found = rows.new_empty(count * len(pieces[0]), *rows.shape[1:])
    gather_parts(found, filled, group)
    return found[:size].movedim(0, dim).contiguous()
