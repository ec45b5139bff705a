"""Whether devices and links compute and carry what they should: copies of a tensor, and work whose result is known.

Copies on several processes are compared bit for bit: sums of their words in one collective of the CPU's.
Under plain data parallelism every process has a copy of all tensors; with hybrid shards each shard has one in every
replica group; what no unit of FSDP2 shards (norms under autocast, adapters that are not sharded) is on all processes;
what processes that compute layers together do not split (norms, routers) is on each of them.
A sum weighs each word by an odd number of its own and wraps at 2^64, so one that a single wrong bit leaves as it was
does not exist. Where sums differ, the processes look for the place.

A device that computes wrongly without an error, or a link that loses bits, shows in no loss for a long time (Dixit et
al. 2021, https://arxiv.org/abs/2102.11245). Products of the numbers -1, 0 and 1 are small integers, exact in every type
of a training and in any order of additions: each device is held to the very result, not to what others found. A product
of drawn numbers uses all bits; it has to be what the device itself computed first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tuner.parallel.lookup import gather_parts, reduce_scatter_parts
from tuner.runtime.parts import cuts_of, local, part_of
from tuner.runtime.process import Collective

CHUNK = 1 << 18
"""Words (4 bytes) that are summed together: what is sent to find a place."""
_MIXER = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number whose multiples are spread over 64 bits."""
_BOUND, _NOBODYS = (1 << 62) - 1, -(1 << 63)


@dataclass(frozen=True)
class Copy:
    """What this process holds of a tensor: one of its shards, or the whole of it."""

    name: str
    tensor: torch.Tensor
    shard: int
    """Which of the shards, from 0."""
    shards: int
    copies: int
    """Processes that hold each of them."""

    @staticmethod
    def of(name: str, tensor: torch.Tensor, processes: int) -> Copy:
        """This process's part of a tensor in a run of so many processes."""
        if not isinstance(tensor, DTensor):
            return Copy(name, tensor, 0, 1, processes)
        mesh, shard, shards = tensor.device_mesh, 0, 1
        place = mesh.get_coordinate()
        assert place is not None, "every process of a run is in its mesh"
        for axis, cut in enumerate(cuts_of(tensor)):
            if cut is not None:
                shard, shards = shard * mesh.size(axis) + place[axis], shards * mesh.size(axis)
        return Copy(name, tensor, shard, shards, processes // shards)

    @property
    def sum(self) -> torch.Tensor:
        """The sum of all its words, an int64 scalar on its device."""
        sums = chunk_sums(self.tensor)
        return (sums * _weights(len(sums), sums.device)).sum()


@dataclass(frozen=True)
class ReplicaDifference:
    """Where a copy differs from what most processes hold."""

    name: str
    rank: int
    """Who holds another copy than most do, or than the lower rank of two."""
    other: int
    """Who holds what most do."""
    place: tuple[int, ...]
    """The first element that differs, in the whole tensor."""
    value: str
    others_value: str
    copies: int
    """How many processes hold one."""
    tensors: tuple[str, ...]
    """All tensors of which any copy differs."""

    def __str__(self) -> str:
        more = f"; {len(self.tensors)} tensors differ in all" if len(self.tensors) > 1 else ""
        unsure = " (of two copies, either may be the damaged one)" if self.copies == 2 else ""
        return (
            f"rank {self.rank} has another {self.name} than rank {self.other}: first at {list(self.place)}, "
            f"{self.value} where rank {self.other} has {self.others_value}{unsure}{more}"
        )


def sums_of(copies: Sequence[Copy]) -> list[int]:
    """The sum of each copy, read from the device at once."""
    sums = [copy.sum for copy in copies]  # of tensors in the host's memory, too
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if copies else []


def first_difference(copies: Sequence[Copy], sums: Sequence[int], ranks: Collective) -> ReplicaDifference | None:
    """Where copies with these sums differ first; None where all are equal. Collective; the same answer on every rank.

    The list has the same names in the same order everywhere.
    """
    slots = [(index, shard) for index, copy in enumerate(copies) for shard in range(copy.shards)]
    if not slots:
        return None
    own, complement = (torch.full((len(slots),), _NOBODYS, dtype=torch.int64) for _ in range(2))
    at = {slot: number for number, slot in enumerate(slots)}
    for index, (copy, value) in enumerate(zip(copies, sums, strict=True)):
        bounded = value & _BOUND  # above what stands for nobody, its complement too
        own[at[index, copy.shard]], complement[at[index, copy.shard]] = bounded, ~bounded
    if ranks.group is not None:
        both = torch.cat([own, complement])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=ranks.group)
        own, complement = both.split(len(slots))
    wrong = [slots[number] for number in (own != ~complement).nonzero().flatten().tolist()]
    if not wrong:
        return None
    names = tuple(dict.fromkeys(copies[index].name for index, _ in wrong))
    index, shard = wrong[0]
    return _locate(copies[index], sums[index], shard, names, ranks)


def _locate(copy: Copy, value: int, shard: int, names: tuple[str, ...], ranks: Collective) -> ReplicaDifference:
    """The first place where a shard's copies differ. Collective."""
    holds = copy.shard == shard
    values = ranks.on_all_ranks(lambda: value if holds else None)
    held = [one for one in values if one is not None]
    usual = Counter(held).most_common(1)[0][0]  # of equally common ones that of the lowest rank
    right = values.index(usual)
    wrong = next(rank for rank, one in enumerate(values) if one is not None and one != usual)
    asked = ranks.rank in (right, wrong)
    sums = ranks.on_all_ranks(lambda: chunk_sums(copy.tensor).tolist() if asked else [])
    chunk = next(n for n, pair in enumerate(zip(sums[right], sums[wrong], strict=True)) if pair[0] != pair[1])
    length = CHUNK * 4 // copy.tensor.element_size()
    parts = ranks.on_all_ranks(lambda: _elements(copy.tensor).split(length)[chunk].cpu().clone() if asked else None)
    ours, theirs = parts[wrong], parts[right]
    assert ours is not None and theirs is not None
    at = int((_bytes_of(ours) != _bytes_of(theirs)).any(1).nonzero()[0])
    places = ranks.on_all_ranks(lambda: _place(copy.tensor, chunk * length + at) if asked else ())
    own, others = _written(ours[at]), _written(theirs[at])
    return ReplicaDifference(copy.name, wrong, right, places[wrong], own, others, len(held), names)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this process's part of a tensor as int32 words, filled up with zeros at the end."""
    flat = _elements(tensor).view(torch.uint8)
    if missing := -flat.numel() % 4:
        flat = functional.pad(flat, (0, missing))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)


def chunk_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Weighed sums of the words of each chunk, int64 ``[chunks]``, modulo 2^64."""
    words = words_of(tensor)
    weights = _weights(min(CHUNK, len(words)), words.device)
    sums = [(part.to(torch.int64) * weights[: len(part)]).sum() for part in words.split(CHUNK)]
    return torch.stack(sums)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers int64 ``[count]``, each its own: modulo 2^64 no product with one loses a bit."""
    return (torch.arange(count, device=device, dtype=torch.int64) * 2 + 1) * _MIXER


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, flat."""
    return local(tensor).detach().contiguous().reshape(-1)


def _bytes_of(elements: torch.Tensor) -> torch.Tensor:
    """``[elements, bytes of one]``."""
    return elements.view(-1, 1).view(torch.uint8)


def _written(element: torch.Tensor) -> str:
    """The value and the bits of a number."""
    value = element.float().item() if element.is_floating_point() else element.item()
    return f"{value:.9g} (0x{bytes(reversed(_bytes_of(element)[0].tolist())).hex()})"


def _place(tensor: torch.Tensor, element: int) -> tuple[int, ...]:
    """The indices of an element of this process's part, in the whole tensor."""
    place = tuple(map(int, np.unravel_index(element, local(tensor).shape)))
    if not isinstance(tensor, DTensor):
        return place
    boxes = part_of(tensor).boxes
    box = next(b for b in boxes if all(a <= i < a + n for i, a, n in zip(place, b.at, b.sizes, strict=True)))
    return tuple(index - at + offset for index, at, offset in zip(place, box.at, box.offsets, strict=True))


_NUMBERS = 4096
"""Elements that each process sends in a collective."""


class KnownProducts:
    """Two products of matrices ``[n, n]`` and their sums over rows, under the autocast of a training.

    Made once, when the drawn one is computed for the first time.
    """

    def __init__(self, device: torch.device, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        self._autocast = autocast
        side = 1024 if device.type == "cuda" else 256
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randint(-1, 2, (side, side), generator=generator).float() for _ in range(2)]
        drawn = [torch.randn(side, side, generator=generator) for _ in range(2)]
        self._expected = (whole[0].double() @ whole[1].double()).to(device)
        self._whole, self._drawn = ([one.to(device) for one in pair] for pair in (whole, drawn))
        self._first = self._of_drawn()

    @torch.no_grad()
    def problem(self) -> str | None:
        """What is wrong with what this device computes now; None where nothing is. Waits for the device."""
        with self._autocast():
            product = self._whole[0] @ self._whole[1]
        wrong = product.double() != self._expected
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            got, right = float(product[row, column]), float(self._expected[row, column])
            return f"a product of matrices is wrong: {got:g} in place of {right:g} at [{row}, {column}]"
        sums = product.sum(0, dtype=torch.float32)
        if not torch.equal(sums.double(), self._expected.sum(0)):
            return "a sum over rows is wrong"
        if not torch.equal(self._of_drawn(), self._first):
            return "a product of matrices is not what it was when the launch began"
        return None

    @torch.no_grad()
    def _of_drawn(self) -> torch.Tensor:
        with self._autocast():
            return self._drawn[0] @ self._drawn[1]


@torch.no_grad()
def wrong_collective(device: torch.device, ranks: Collective) -> str | None:
    """What this process found wrong in collectives of known numbers over all processes. Collective.

    Sums of integers below 2^24, exact in float32; what is gathered says who sent it.
    """
    if ranks.group is None:
        return None
    size, rank = ranks.size, ranks.rank
    numbers = torch.arange(_NUMBERS, dtype=torch.float32, device=device) % 251
    total = numbers * size + size * (size - 1) / 2
    summed, gathered, own = numbers + rank, numbers.new_empty(size, _NUMBERS), numbers.new_empty(1, _NUMBERS)
    # All of them before any is judged: the others take part whatever this process finds.
    dist.all_reduce(summed)
    gather_parts(gathered, (numbers + rank)[None].contiguous(), None)
    reduce_scatter_parts(own, (numbers + rank).expand(size, -1).contiguous(), None)
    if not torch.equal(summed, total):
        return "an all-reduce of known numbers gave others"
    expected = numbers + torch.arange(size, device=device)[:, None]
    if wrong := (gathered != expected).any(1).nonzero().flatten().tolist():
        return f"an all-gather brought other numbers than rank {wrong[0]} sent"
    return None if torch.equal(own[0], total) else "a reduce-scatter of known numbers gave others"
