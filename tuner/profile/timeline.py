"""From a trace's changes to what a prediction shows: parts, fullest moments, and what each layer keeps."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tuner.profile.prediction import PARTS, MemoryMoment, MemoryTimeline, Part
from tuner.profile.tracing import StepTrace

if TYPE_CHECKING:
    from tuner.profile.allocations import Storage

ROOT = "model."
"""The model's name in the module that is trained, which is left out."""


def memory_timeline(
    trace: StepTrace, always: Mapping[Part, int], expandable: bool = False, by_tensors: bool = False
) -> MemoryTimeline:
    """The timeline of a trace, with bytes that are ``always`` there added to it.

    On CUDA it is what the allocator holds, with ``expandable`` segments or without. ``by_tensors`` takes the moments at
    which most is asked of it, with the most that it holds in the same turn: what is asked grows evenly with the layers,
    and at which of two moments that ask for nearly as much it holds more does not.
    """
    parts, names = parts_of(trace), _names(trace)
    allocator = ExpandableAllocator() if expandable else CachingAllocator()
    held = _held(trace, allocator) if trace.target == "cuda" else None
    now: dict[Part, int] = {**dict.fromkeys(PARTS, 0), **always}
    host: dict[Part, int] = {}
    host_peak: dict[Part, int] = {}
    moments: list[MemoryMoment] = []
    for number, change in enumerate(trace.changes):
        if held is not None and trace.storages[change.storage].host:
            host[parts[change.storage]] = host.get(parts[change.storage], 0) + change.delta
            host_peak = max(host_peak, dict(host), key=lambda sizes: sum(sizes.values()))
            continue
        now[parts[change.storage]] += change.delta
        if number + 1 < trace.marks[0][1]:
            continue
        if held is not None:
            now["rounding"] = held[number] - (sum(now.values()) - now["rounding"] - sum(always.values()))
        moment = MemoryMoment(change.phase, names[change.module], dict(now))
        if not moments or (moments[-1].phase, moments[-1].module) != (moment.phase, moment.module):
            moments.append(moment)
        else:
            moments[-1] = _fullest(moments[-1], moment, by_tensors)
    return MemoryTimeline(tuple(moments), _kept(trace, parts, names), host_peak)


def _fullest(one: MemoryMoment, other: MemoryMoment, by_tensors: bool) -> MemoryMoment:
    """The fuller of two moments, the first of equal ones."""
    if not by_tensors:
        return other if other.total > one.total else one
    held = max(one.total, other.total)
    more, asked = max(((it, it.total - it.parts["rounding"]) for it in (one, other)), key=lambda pair: pair[1])
    return replace(more, parts={**more.parts, "rounding": held - asked})


def parts_of(trace: StepTrace) -> list[Part]:
    """The part of each of the trace's storages: what it was assigned, or what its lifetime tells."""
    kept = _living_at(trace, "backward", "forward")
    gradients = _living_at(trace, "forward", "backward") | _living_at(trace, "optimizer", "backward")

    def part(number: int, storage: Storage) -> Part:
        if storage.part is not None:
            return storage.part
        if number in gradients:
            return "gradients"
        if storage.phase == "forward" and not storage.module:
            return "loss"
        return "activations" if number in kept or storage.recomputed else "other"

    return [part(number, storage) for number, storage in enumerate(trace.storages)]


def _living_at(trace: StepTrace, mark: str, phase: str) -> set[int]:
    """Storages made in a phase that are there at a mark of this name."""
    found: set[int] = set()
    living: set[int] = set()
    ends = {at for name, at in trace.marks if name == mark}
    for number, change in enumerate(trace.changes):
        if number in ends:
            found |= living
        if trace.storages[change.storage].phase == phase:
            (living.add if change.delta > 0 else living.discard)(change.storage)
    return found | living if len(trace.changes) in ends else found


def _names(trace: StepTrace) -> dict[str, str]:
    """Each module's name as it is shown: that of the decoder layer that it lies in, as transformers names it."""

    def shown(module: str) -> str:
        layer = next((block for block in trace.blocks if f"{module}.".startswith(f"{block}.")), module)
        return layer.removeprefix(ROOT)

    return {module: shown(module) for module in {change.module for change in trace.changes}}


def _kept(trace: StepTrace, parts: Sequence[Part], names: Mapping[str, str]) -> dict[str, int]:
    """Activations that are there when the last microbatch's backward pass begins, by layer."""
    last = max((number for number, (name, _) in enumerate(trace.marks) if name == "forward"), default=0)
    start, end = trace.marks[last][1], trace.marks[last + 1][1]
    found = dict.fromkeys([*(block.removeprefix(ROOT) for block in trace.blocks), ""], 0)
    for change in trace.changes[start:end]:
        if parts[change.storage] == "activations":
            name = names[trace.storages[change.storage].module]
            found[name if name in found else ""] += change.delta
    return found


def _held(trace: StepTrace, allocator: CachingAllocator | ExpandableAllocator) -> list[int]:
    """Bytes of the device that the allocator holds after each change."""
    sizes: dict[int, int] = {}
    blocks: dict[int, SegmentBlock] = {}
    held = []
    for change in trace.changes:
        if trace.storages[change.storage].host:
            held.append(allocator.held)
            continue
        sizes[change.storage] = size = sizes.get(change.storage, 0) + change.delta
        if change.storage in blocks:
            allocator.free(blocks.pop(change.storage))
        if size > 0:
            blocks[change.storage] = allocator.allocate(size)
        held.append(allocator.held)
    return held


ROUNDED = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
OWN_SEGMENT, LARGE_SEGMENT = 10 << 20, 20 << 20
SEGMENT_ROUNDED = 2 << 20
PAGES = {True: SMALL_SEGMENT, False: LARGE_SEGMENT}
"""Bytes by which an expandable segment of small blocks grows, and one of others."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class SegmentBlock(NamedTuple):
    """A stretch of a segment. Free ones are taken in their order: by size, then address."""

    size: int
    segment: int
    start: int


class _FreeBlocks:
    """Free blocks of one kind, found by size and by their neighbours."""

    def __init__(self) -> None:
        self.blocks: list[SegmentBlock] = []
        self._by_start: dict[tuple[int, int], SegmentBlock] = {}  # by segment and address
        self.by_end: dict[tuple[int, int], SegmentBlock] = {}

    def add(self, block: SegmentBlock) -> None:
        insort(self.blocks, block)
        self._by_start[block.segment, block.start] = self.by_end[block.segment, block.start + block.size] = block

    def remove(self, block: SegmentBlock) -> SegmentBlock:
        self.blocks.pop(bisect_left(self.blocks, block))
        del self._by_start[block.segment, block.start], self.by_end[block.segment, block.start + block.size]
        return block

    def joined(self, block: SegmentBlock) -> SegmentBlock:
        """A block that becomes free, with its free neighbours, which are free blocks of their own no more."""
        size, segment, start = block
        if (before := self.by_end.get((segment, start))) is not None:
            size, start = size + self.remove(before).size, before.start
        if (after := self._by_start.get((segment, start + size))) is not None:
            size += self.remove(after).size
        return SegmentBlock(size, segment, start)


class CachingAllocator:
    """The allocator by its default settings; segments count with at least one block given out.

    Small blocks are cut from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size
    rounded up to 2 MiB.
    """

    def __init__(self) -> None:
        self.held = 0  # bytes of the device that cannot be given back to it
        self._segments: list[tuple[int, bool]] = []  # their sizes, and whether small blocks are cut from them
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}

    def allocate(self, size: int) -> SegmentBlock:
        """A block of at least so many bytes."""
        wanted = _rounded(size)
        is_small = wanted <= SMALL
        free = self._free[is_small]
        at = bisect_left(free.blocks, (wanted,))
        block = free.remove(free.blocks[at]) if at < len(free.blocks) else self._new_segment(wanted, is_small)
        if self._is_whole(block):
            self.held += block.size
        rest = block.size - wanted
        if rest >= ROUNDED if is_small else rest > SMALL:
            free.add(SegmentBlock(rest, block.segment, block.start + wanted))
            block = block._replace(size=wanted)
        return block

    def free(self, block: SegmentBlock) -> None:
        """Take a block back."""
        free = self._free[self._segments[block.segment][1]]
        whole = free.joined(block)
        if self._is_whole(whole):
            self.held -= whole.size
        free.add(whole)

    def _new_segment(self, wanted: int, is_small: bool) -> SegmentBlock:
        own = -(-wanted // SEGMENT_ROUNDED) * SEGMENT_ROUNDED
        size = SMALL_SEGMENT if is_small else LARGE_SEGMENT if wanted < OWN_SEGMENT else own
        self._segments.append((size, is_small))
        return SegmentBlock(size, len(self._segments) - 1, 0)

    def _is_whole(self, block: SegmentBlock) -> bool:
        """Whether a block is its segment."""
        return block.size == self._segments[block.segment][0]


class ExpandableAllocator:
    """The allocator with ``expandable_segments``: a segment of small blocks and one of others, which grow at their end.

    They grow by whole pages, of 2 and of 20 MiB; pages count that hold at least one block. The free block at the end of
    a segment is used last, since it can grow. That addresses in the middle are mapped again, after pages were given
    back for want of memory, is not replayed: it takes no more pages.
    """

    def __init__(self) -> None:
        self.held = 0
        self._ends = {True: 0, False: 0}
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}
        self._on_page: Counter[tuple[int, int]] = Counter()  # blocks by segment and page

    def allocate(self, size: int) -> SegmentBlock:
        """A block of at least so many bytes."""
        wanted = _rounded(size)
        is_small = wanted <= SMALL
        free = self._free[is_small]
        at = bisect_left(free.blocks, (wanted,))
        if at + 1 < len(free.blocks) and free.blocks[at].start + free.blocks[at].size == self._ends[is_small]:
            at += 1
        block = free.remove(free.blocks[at]) if at < len(free.blocks) else self._grown(wanted, is_small)
        if block.size > wanted:
            free.add(SegmentBlock(block.size - wanted, block.segment, block.start + wanted))
            block = block._replace(size=wanted)
        for page in self._pages(block):
            self._on_page[page] += 1
            self.held += PAGES[is_small] * (self._on_page[page] == 1)
        return block

    def free(self, block: SegmentBlock) -> None:
        """Take a block back."""
        is_small = bool(block.segment)
        for page in self._pages(block):
            self._on_page[page] -= 1
            self.held -= PAGES[is_small] * (self._on_page[page] == 0)
        self._free[is_small].add(self._free[is_small].joined(block))

    def _grown(self, wanted: int, is_small: bool) -> SegmentBlock:
        """The last stretch of the segment, with as many new pages as it takes."""
        free, end, page = self._free[is_small], self._ends[is_small], PAGES[is_small]
        last = free.by_end.get((int(is_small), end))
        start = end if last is None else free.remove(last).start
        self._ends[is_small] = -(-(start + wanted) // page) * page
        return SegmentBlock(self._ends[is_small] - start, int(is_small), start)

    @staticmethod
    def _pages(block: SegmentBlock) -> list[tuple[int, int]]:
        size = PAGES[bool(block.segment)]
        last = (block.start + block.size - 1) // size
        return [(block.segment, page) for page in range(block.start // size, last + 1)]


def expands_segments(environment: Mapping[str, str]) -> bool:
    """Whether a training's allocator has expandable segments: unless the environment sets the allocator otherwise."""
    settings = next((environment[name] for name in _SETTINGS if environment.get(name)), "expandable_segments:True")
    found = re.search(r"expandable_segments\s*:\s*(\w+)", settings)
    return found is not None and found[1].lower() in {"true", "1"}


def _rounded(size: int) -> int:
    return max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
