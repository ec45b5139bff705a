"""The replayed allocator, by hand from torch's rules."""

from __future__ import annotations

import random

from tuner.profile.cuda_allocator import CachingAllocator

MIB = 1 << 20


def test_sizes_are_rounded_and_segments_are_as_torch_makes_them() -> None:
    for size, held in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        block = allocator.allocate(size)
        assert allocator.held == held * MIB, size
        assert block.size >= size and block.size % 512 == 0


def test_a_segment_is_split_and_made_one_again() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(3 * MIB), allocator.allocate(4 * MIB)
    assert (first.segment, second.start, allocator.held) == (second.segment, 3 * MIB, 20 * MIB)
    allocator.free(first)
    assert allocator.held == 20 * MIB
    allocator.free(second)
    assert allocator.held == 0
    again = allocator.allocate(8 * MIB)
    assert (again.segment, again.start, allocator.held) == (first.segment, 0, 20 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken_whole_where_little_is_left() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 20)]
    for block in blocks:
        allocator.free(block)
    taken = allocator.allocate(11 * MIB)
    assert (taken.segment, taken.size) == (blocks[1].segment, 12 * MIB)
    assert allocator.allocate(13 * MIB).segment == blocks[2].segment


def test_nothing_is_lost_over_many_turns() -> None:
    generator, allocator = random.Random(0), CachingAllocator()
    living = []
    for _ in range(3000):
        if living and generator.random() < 0.5:
            allocator.free(living.pop(generator.randrange(len(living))))
        else:
            living.append(allocator.allocate(generator.choice((100, 5000, 700_000, 3 * MIB, 17 * MIB))))
        assert sum(block.size for block in living) <= allocator.held
        places = sorted((block.segment, block.start, block.size) for block in living)
        assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in zip(places, places[1:], strict=False))
    for block in living:
        allocator.free(block)
    assert allocator.held == 0
