"""Bin packing by counts: items of equal length are handled together, so a million items cost what a few thousand do.

Three ways of filling rows, each in one Python step per distinct (length, free space) or per distinct kind of row:
best fit decreasing, first fit decreasing, and rows completed exactly. The first that meets the lower bound is used,
otherwise the one with the fewest rows. Which items lie where is worked out once, at the end, in numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tuner.data.ranges import Ints, offsets_of, ranges

Int32s = npt.NDArray[np.int32]
MAX_ITEMS = 1 << 31
"""Items are numbered in 32 bits."""
_PAIRS_TRIED = 4


@dataclass(frozen=True)
class _Plan:
    """Steps in descending order of length: each puts `each` items of one length into every one of `count` rows."""

    n_rows: int
    each: Ints
    count: Ints
    rows: Int32s
    """int32[sum of count]: the rows of the first step, then those of the second, and so on."""


def pack(lengths: npt.NDArray[np.integer], capacity: int) -> tuple[Int32s, Ints]:
    """Pack items of 1 to `capacity` tokens into rows; returns (item ids row by row, int64 offsets of the rows).

    The number of rows and what lengths they hold follow from the multiset of lengths alone; items of equal length are
    handed out in their order. Inside a row items are in ascending order. Never more rows than first fit decreasing.
    Raises ValueError for a length outside 1..capacity and for 2^31 items or more.
    """
    if len(lengths) == 0:
        return np.empty(0, np.int32), np.zeros(1, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity or len(lengths) >= MAX_ITEMS:
        raise ValueError(f"items of 1 to {capacity} tokens, fewer than 2^31 of them, can be packed")
    counts = np.bincount(lengths, minlength=capacity + 1)
    bound = lower_bound(counts)
    best: _Plan | None = None
    for fill in _FILLS:
        plan = fill(counts)
        if best is None or plan.n_rows < best.n_rows:
            best = plan
        if best.n_rows == bound:
            break
    assert best is not None
    return _hand_out(lengths, capacity, best)


def lower_bound(counts: Ints) -> int:
    """Return a number of rows that no packing goes below; `counts[l]` items have length l, the last is the capacity.

    The bound L2 of Martello and Toth (1990), the best over every k up to half a row: items above `capacity - k` take a
    row each, items above half a row share with none of their kind, and what items of at least k tokens overfill the
    room next to those takes further rows. With k = 0 it is at least the sum of lengths over the capacity.
    """
    capacity, half = len(counts) - 1, (len(counts) - 1) // 2
    tokens = np.cumsum(counts * np.arange(capacity + 1))
    items = np.cumsum(counts)
    k = np.arange(half + 1)
    room = (items[capacity - k] - items[half]) * capacity - (tokens[capacity - k] - tokens[half])
    small = tokens[half] - np.where(k > 0, tokens[k - 1], 0)
    return int(items[capacity] - items[half] + np.maximum(0, -(-(small - room) // capacity)).max())


def _best_fit(counts: Ints) -> _Plan:
    """Best fit decreasing: each item goes to the fullest row that still takes it.

    Rows are told apart by their free space only. A big integer has bit f set where some row has f tokens free, so the
    fullest row that takes a length is the lowest set bit at or above it; that row is the best again until it takes no
    more. Rows of one class are served in order of arrival, which gives every stay of a row in a class a slot: rows move
    from slots to slots, and the row of each slot is found afterwards for all of them at once.
    """
    capacity = len(counts) - 1
    arrived, served = [0] * (capacity + 1), [0] * (capacity + 1)
    occupied = 0
    steps: list[tuple[int, int, int, int, int, int]] = []  # each, count, class, its slot, next class, its slot
    for length in np.flatnonzero(counts)[::-1].tolist():
        items = int(counts[length])
        while items:
            fitting = occupied >> length
            free = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = min(free // length, items)
            count = items // each
            if fitting:
                count = min(count, arrived[free] - served[free])
            left = free - each * length
            steps.append((each, count, free, served[free], left, arrived[left]))
            items -= each * count
            served[free] += count
            if fitting and served[free] == arrived[free]:
                occupied ^= 1 << free
            if left:
                arrived[left] += count
                occupied |= 1 << left
    each_, counts_, source, source_slot, target, target_slot = np.array(steps, dtype=np.int64).T
    # Slots of the class `capacity` come first: there a slot is a new row.
    slots = np.array([served[capacity], *arrived[1:capacity]], dtype=np.int64)
    starts = np.cumsum(slots) - slots
    first = np.where(source == capacity, 0, starts[source % capacity]) + source_slot
    taken = ranges(first, counts_, np.int32)
    moved = target > 0
    reached = ranges((starts[target % capacity] + target_slot)[moved], counts_[moved], np.int32)
    before = np.arange(slots.sum(), dtype=np.int32)
    before[reached] = taken[np.repeat(moved, counts_)]
    del reached
    while before.max(initial=0) >= served[capacity]:
        before = before[before]
    return _Plan(served[capacity], each_, counts_, before[taken])


def _first_fit(counts: Ints, completed: bool = False) -> _Plan:
    """First fit decreasing, a row at a time: the longest item, then the longest that fits, and on.

    Where rows are `completed`, one takes one or two items that fill it exactly as soon as there are any. As many rows
    like it as the counts allow are filled with it: each kind of row uses up some length.
    """
    left = _Lengths(counts)
    kinds: list[tuple[int, int, int, int]] = []  # length, items of it in a row, rows, first row
    n_rows = 0
    while left.occupied:
        row = left.completed_row() if completed else left.greedy_row()
        alike = min(left.counts[length] // each for length, each in row.items())
        for length, each in row.items():
            kinds.append((length, each, alike, n_rows))
            left.remove(length, each * alike)
        n_rows += alike
    table = np.array(kinds, dtype=np.int64)
    lengths, each_, counts_, first = table[np.argsort(-table[:, 0], kind="stable")].T
    return _Plan(n_rows, each_, counts_, ranges(first, counts_, np.int32))


class _Lengths:
    """The items that are left: how many of each length, and which lengths as bits, forward and mirrored."""

    def __init__(self, counts: Ints) -> None:
        self.capacity = len(counts) - 1
        self.counts: list[int] = counts.tolist()
        present = counts > 0
        self.occupied = _bits(present)
        self._mirrored = _bits(present[::-1])  # bit capacity - l for length l

    def remove(self, length: int, items: int) -> None:
        self.counts[length] -= items
        if not self.counts[length]:
            self.occupied ^= 1 << length
            self._mirrored ^= 1 << (self.capacity - length)

    def greedy_row(self) -> dict[int, int]:
        """Length -> items: the longest, then as many as fit of the longest that fits, until nothing does."""
        row: dict[int, int] = {}
        free = below = self.capacity
        while fitting := self.occupied & _up_to(min(free, below)):
            length = fitting.bit_length() - 1
            row[length] = min(free // length, self.counts[length])
            free, below = free - row[length] * length, length - 1
        return row

    def completed_row(self) -> dict[int, int]:
        """Length -> items: the longest that fits, item by item, until one or two of the rest fill the row exactly."""
        row: dict[int, int] = {}
        free = below = self.capacity
        while fitting := self.occupied & _up_to(min(free, below)):
            length = fitting.bit_length() - 1
            if self.counts[length] == row.get(length, 0):
                below = length - 1
                continue
            for taken in (length, *self._completion(row, length, free - length)):
                row[taken] = row.get(taken, 0) + 1
                free -= taken
            below = length
        return row

    def _completion(self, row: dict[int, int], last: int, free: int) -> tuple[int, ...]:
        """One or two lengths, none above `last`, that are left besides `row` and `last` and sum to `free`; or none."""

        def has(length: int, times: int) -> bool:
            return self.counts[length] - row.get(length, 0) - (length == last) >= times

        if 0 < free <= last and has(free, 1):
            return (free,)
        # Bit a is set where both a and free - a are lengths of items that are left.
        pairs = self.occupied & (self._mirrored >> (self.capacity - free)) & _up_to(min(free - 1, last)) if free else 0
        for _ in range(_PAIRS_TRIED):
            larger = pairs.bit_length() - 1
            smaller = free - larger
            if larger < smaller:
                return ()
            if has(larger, 1 + (larger == smaller)) and has(smaller, 1):
                return (larger, smaller)
            pairs ^= 1 << larger
        return ()


_FILLS: tuple[Callable[[Ints], _Plan], ...] = (_best_fit, _first_fit, partial(_first_fit, completed=True))


def _bits(flags: npt.NDArray[np.bool_]) -> int:
    """An integer with bit i set where `flags[i]` is."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _up_to(length: int) -> int:
    """Bits 1 to `length`."""
    return (1 << (length + 1)) - 2 if length > 0 else 0


def _hand_out(lengths: npt.NDArray[np.integer], capacity: int, plan: _Plan) -> tuple[Int32s, Ints]:
    """Give each item its row: the longest items to the first steps, equal ones in their order."""
    room = np.subtract(capacity, lengths, dtype=np.int64)
    rows = np.repeat(plan.rows, np.repeat(plan.each, plan.count)).astype(np.int64)
    offsets = offsets_of(np.bincount(rows, minlength=plan.n_rows))
    return _sorted_items(rows, _sorted_items(room, np.arange(len(lengths), dtype=np.int32))), offsets


def _sorted_items(keys: Ints, items: Int32s) -> Int32s:
    """The items by (key, item); overwrites `keys`. One sort of whole numbers is much faster than a stable argsort."""
    keys <<= 32
    keys |= items
    del items  # lets go of a temporary before the next is made
    keys.sort()
    return keys.astype(np.int32)  # the lower half
