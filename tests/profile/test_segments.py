"""The replayed allocator, by hand from torch's rules."""

from __future__ import annotations

import random

from tuner.profile.segments import CachingAllocator, is_small

MIB = 1 << 20


def test_sizes_are_rounded_and_segments_are_as_torch_makes_them() -> None:
    for size, reserved in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        block = allocator.allocate(size)
        assert allocator.reserved == allocator.held == reserved * MIB, size
        assert allocator.used == block.size >= size and block.size % 512 == 0


def test_a_segment_is_split_and_made_one_again() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(3 * MIB), allocator.allocate(4 * MIB)
    assert (first.segment, second.start, allocator.reserved) == (second.segment, 3 * MIB, 20 * MIB)
    allocator.free(first, False)
    assert (allocator.used, allocator.held) == (4 * MIB, 20 * MIB)
    allocator.free(second, False)
    assert (allocator.used, allocator.held, allocator.reserved) == (0, 0, 20 * MIB)
    assert allocator.allocate(8 * MIB).start == 0 and allocator.reserved == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_whole_where_little_is_left() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 20)]
    for block in blocks:
        allocator.free(block, False)
    taken = allocator.allocate(11 * MIB)
    assert (taken.segment, taken.size) == (blocks[1].segment, 12 * MIB)
    assert allocator.allocate(13 * MIB).segment == blocks[2].segment


def test_nothing_is_lost_over_many_turns() -> None:
    generator, allocator = random.Random(0), CachingAllocator()
    living = []
    for _ in range(3000):
        if living and generator.random() < 0.5:
            block, size = living.pop(generator.randrange(len(living)))
            allocator.free(block, is_small(size))
        else:
            size = generator.choice((100, 5000, 700_000, 3 * MIB, 17 * MIB))
            living.append((allocator.allocate(size), size))
        assert allocator.used == sum(block.size for block, _ in living) <= allocator.held <= allocator.reserved
        places = sorted((block.segment, block.start, block.size) for block, _ in living)
        assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in zip(places, places[1:], strict=False))
    for block, size in living:
        allocator.free(block, is_small(size))
    assert allocator.used == allocator.held == 0
