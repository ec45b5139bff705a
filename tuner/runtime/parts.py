"""Which elements of a whole tensor a process has, by the placements of a DTensor: boxes, computed without a collective.

An axis of a mesh that splits a dimension cuts what the axes before it have left into as many pieces as it has
processes, each as long as the first but for the last ones. One that is strided (torch's ``_StridedShard``, known by its
``split_factor``) first cuts that into so many parts, and each of them into pieces: so lie a fused projection, of whose
parts each process has a share, and what FSDP2 cuts again after tensor parallelism has split it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """How an axis of a mesh splits a tensor: along a dimension, of which it first makes so many parts."""

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Box:
    """Elements that lie together in the whole tensor, and in the part of it that a process has."""

    offsets: tuple[int, ...]
    """Where the box begins in the whole."""
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    """Where it begins in the part."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of the whole, a view."""
        return _narrowed(whole, self.offsets, self.sizes)

    def within(self, part: torch.Tensor) -> torch.Tensor:
        """These elements of the part, a view."""
        return _narrowed(part, self.at, self.sizes)

    def common(self, other: Box) -> Box | None:
        """What of it lies in another box of the whole, too; None where nothing does."""
        first = tuple(map(max, self.offsets, other.offsets))
        ends = (map(sum, zip(box.offsets, box.sizes, strict=True)) for box in (self, other))
        sizes = tuple(min(end) - start for *end, start in zip(*ends, first, strict=True))
        if min(sizes, default=1) <= 0:
            return None
        return Box(first, sizes, tuple(at + to - of for at, to, of in zip(self.at, first, self.offsets, strict=True)))

    def within_rows(self, start: int, stop: int) -> Box | None:
        """What of it lies in these rows of the whole, from ``start`` on as rows of their own; None where nothing does.

        A tensor without dimensions is one row.
        """
        if not self.sizes:
            return self
        first, last = max(self.offsets[0], start), min(self.offsets[0] + self.sizes[0], stop)
        if first >= last:
            return None
        skipped = first - self.offsets[0]
        return Box(
            (first - start, *self.offsets[1:]), (last - first, *self.sizes[1:]), (self.at[0] + skipped, *self.at[1:])
        )


@dataclass(frozen=True)
class TensorPart:
    """What one process has of a tensor: boxes that fill its part, none where that is empty."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, through which gradients go; all of one that does not lie over processes."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def part_of(tensor: DTensor) -> TensorPart:
    """What this process has of a tensor. Raises ValueError for one that is a sum over processes."""
    mesh = tensor.device_mesh
    if (place := mesh.get_coordinate()) is None:
        return TensorPart((0,) * tensor.ndim, ())
    return part_at(tuple(tensor.shape), tuple(mesh.shape), cuts_of(tensor), tuple(place))


@lru_cache(maxsize=4096)
def part_at(
    shape: tuple[int, ...], axes: tuple[int, ...], cuts: tuple[Cut | None, ...], place: tuple[int, ...]
) -> TensorPart:
    """What the process at a ``place`` of a mesh with ``axes`` of these sizes has of a tensor that they cut in order."""
    runs = [[range(size)] if size else [] for size in shape]
    for size, index, own in zip(axes, place, cuts, strict=True):
        if own is not None:
            runs[own.dim] = _piece(runs[own.dim], size, index, own.parts)
    found = tuple(sum(map(len, of_dim)) for of_dim in runs)
    if not all(runs):
        return TensorPart(found, ())
    starts = [[0, *accumulate(map(len, of_dim))] for of_dim in runs]
    boxes = []
    for numbers in product(*(range(len(of_dim)) for of_dim in runs)):
        chosen = [of_dim[number] for of_dim, number in zip(runs, numbers, strict=True)]
        at = tuple(of_dim[number] for of_dim, number in zip(starts, numbers, strict=True))
        boxes.append(Box(tuple(run.start for run in chosen), tuple(map(len, chosen)), at))
    return TensorPart(found, tuple(boxes))


def cut_of(placement: Any) -> Cut | None:
    """How an axis with this placement splits a tensor; None where its processes all have the same.

    To torch a strided placement is no ``Shard``, and its ``is_shard`` says no. Raises ValueError for a sum over them.
    """
    if placement.is_partial():
        raise ValueError("a tensor that is a sum over processes has no parts")
    return None if placement.is_replicate() else Cut(int(placement.dim), int(getattr(placement, "split_factor", 1)))


def cuts_of(tensor: DTensor) -> tuple[Cut | None, ...]:
    """How the axes of its mesh split a tensor. Raises ValueError for one that is a sum over processes."""
    return tuple(map(cut_of, tensor.placements))


def pieces_of(count: int, pieces: int) -> list[range]:
    """Numbers below ``count`` in so many pieces, as torch cuts them: of one length, the last ones shorter or empty."""
    step = -(-count // pieces)
    return [range(min(number * step, count), min((number + 1) * step, count)) for number in range(pieces)]


def _piece(runs: Sequence[range], pieces: int, index: int, parts: int) -> list[range]:
    """The runs of one piece; those that touch become one."""
    found: list[range] = []
    for part in pieces_of(sum(map(len, runs)), parts):
        own = pieces_of(len(part), pieces)[index]
        for run in _within(runs, part.start + own.start, part.start + own.stop):
            if found and found[-1].stop == run.start:
                found[-1] = range(found[-1].start, run.stop)
            else:
                found.append(run)
    return found


def _within(runs: Sequence[range], start: int, stop: int) -> Iterator[range]:
    """What lies from the ``start``-th to the ``stop``-th element of runs that are laid end to end."""
    first = 0
    for run in runs:
        low, high = max(start - first, 0), min(stop - first, len(run))
        if low < high:
            yield run[low:high]
        first += len(run)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
