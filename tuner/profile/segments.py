"""Torch's caching allocator of CUDA memory, replayed: what it holds of the device for the storages that a step makes.

After ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.13 with its default settings: sizes are rounded up to 512 bytes;
blocks up to 1 MiB are cut from segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size
rounded up to 2 MiB. The smallest free block that is large enough is taken, and split where enough is left; neighbours
that are free become one. All on one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ROUNDED = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
OWN_SEGMENT, LARGE_SEGMENT = 10 << 20, 20 << 20
SEGMENT_ROUNDED = 2 << 20


@dataclass(eq=False)
class Block:
    """A stretch of a segment, and its neighbours there."""

    segment: int
    start: int
    size: int
    used: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """By which free blocks lie in order: size, then address."""
        return self.size, self.segment, self.start


class CachingAllocator:
    """``used`` bytes of blocks are given out, and ``held`` bytes of segments hold at least one of them.

    ``reserved`` counts empty segments too: the allocator keeps them, and gives them back where memory runs out.
    """

    def __init__(self) -> None:
        self.used = self.held = self.reserved = 0
        self._free: dict[bool, list[tuple[tuple[int, int, int], Block]]] = {True: [], False: []}
        self._segments = 0

    def allocate(self, size: int) -> Block:
        """A block of at least so many bytes."""
        wanted = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        is_small = wanted <= SMALL
        block = self._best(wanted, is_small) or self._segment(wanted, is_small)
        if _is_whole(block):
            self.held += block.size
        rest = block.size - wanted
        if rest >= ROUNDED if is_small else rest > SMALL:
            self._split(block, wanted, is_small)
        block.used = True
        self.used += block.size
        return block

    def free(self, block: Block, is_small: bool) -> None:
        """Take a block back; ``is_small`` as it was asked for."""
        self.used -= block.size
        block.used = False
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._take(other, is_small)
                _merge(block, other)
        if _is_whole(block):
            self.held -= block.size
        insort(self._free[is_small], (block.key, block), key=lambda item: item[0])

    def _best(self, wanted: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        at = bisect_left(free, (wanted, -1, -1), key=lambda item: item[0])
        return free.pop(at)[1] if at < len(free) else None

    def _segment(self, wanted: int, is_small: bool) -> Block:
        size = -(-wanted // SEGMENT_ROUNDED) * SEGMENT_ROUNDED
        if is_small:
            size = SMALL_SEGMENT
        elif wanted < OWN_SEGMENT:
            size = LARGE_SEGMENT
        self._segments += 1
        self.reserved += size
        return Block(self._segments, 0, size)

    def _split(self, block: Block, wanted: int, is_small: bool) -> None:
        rest = Block(block.segment, block.start + wanted, block.size - wanted, False, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, wanted
        insort(self._free[is_small], (rest.key, rest), key=lambda item: item[0])

    def _take(self, block: Block, is_small: bool) -> None:
        free = self._free[is_small]
        free.pop(bisect_left(free, block.key, key=lambda item: item[0]))


def is_small(size: int) -> bool:
    """Whether so many bytes are cut from a small segment."""
    return size <= SMALL


def _is_whole(block: Block) -> bool:
    """Whether a block is its segment."""
    return block.before is None and block.after is None


def _merge(block: Block, other: Block) -> None:
    """Let ``block`` have what ``other``, its neighbour, was."""
    if other is block.before:
        block.start, block.before = other.start, other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    block.size += other.size
