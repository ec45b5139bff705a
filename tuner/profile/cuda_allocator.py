"""Torch's caching allocator of CUDA memory, replayed: what it holds of the device for the storages that a step makes.

After ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13 with its default settings: sizes are rounded up to 512 bytes;
blocks up to 1 MiB are cut from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size
rounded up to 2 MiB. The smallest free block that is large enough is taken, and split where enough is left; neighbours
that are free become one. All on one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

ROUNDED = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
OWN_SEGMENT, LARGE_SEGMENT = 10 << 20, 20 << 20
SEGMENT_ROUNDED = 2 << 20


class Block(NamedTuple):
    """A stretch of a segment. Free ones are taken in their order: by size, then address."""

    size: int
    segment: int
    start: int


class CachingAllocator:
    """``held`` bytes of segments have at least one block given out."""

    def __init__(self) -> None:
        self.held = 0
        self._segments: list[tuple[int, bool]] = []  # their sizes, and whether small blocks are cut from them
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._by_start: dict[tuple[int, int], Block] = {}  # free ones, by segment and address
        self._by_end: dict[tuple[int, int], Block] = {}

    def allocate(self, size: int) -> Block:
        """A block of at least so many bytes."""
        wanted = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        is_small = wanted <= SMALL
        free = self._free[is_small]
        at = bisect_left(free, (wanted,))
        block = self._remove(free[at]) if at < len(free) else self._new_segment(wanted, is_small)
        if self._is_whole(block):
            self.held += block.size
        rest = block.size - wanted
        if rest >= ROUNDED if is_small else rest > SMALL:
            self._add(Block(rest, block.segment, block.start + wanted))
            block = block._replace(size=wanted)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        size, segment, start = block
        if (before := self._by_end.get((segment, start))) is not None:
            size, start = size + self._remove(before).size, before.start
        if (after := self._by_start.get((segment, start + size))) is not None:
            size += self._remove(after).size
        whole = Block(size, segment, start)
        if self._is_whole(whole):
            self.held -= size
        self._add(whole)

    def _new_segment(self, wanted: int, is_small: bool) -> Block:
        size = -(-wanted // SEGMENT_ROUNDED) * SEGMENT_ROUNDED
        if is_small:
            size = SMALL_SEGMENT
        elif wanted < OWN_SEGMENT:
            size = LARGE_SEGMENT
        self._segments.append((size, is_small))
        return Block(size, len(self._segments) - 1, 0)

    def _is_whole(self, block: Block) -> bool:
        """Whether a block is its segment."""
        return block.size == self._segments[block.segment][0]

    def _add(self, block: Block) -> None:
        insort(self._free[self._segments[block.segment][1]], block)
        self._by_start[block.segment, block.start] = self._by_end[block.segment, block.start + block.size] = block

    def _remove(self, block: Block) -> Block:
        free = self._free[self._segments[block.segment][1]]
        free.pop(bisect_left(free, block))
        del self._by_start[block.segment, block.start], self._by_end[block.segment, block.start + block.size]
        return block
