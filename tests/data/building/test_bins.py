
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.data.building.bins import _FILLS, _hand_out, lower_bound, pack

CAPACITY = 30
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)
# Lengths of which three or four go into a row: where greedy packing does worst.
MIDDLE = st.lists(st.integers(6, 15), min_size=1, max_size=60)


def records_of(lengths: list[int], capacity: int = CAPACITY) -> list[list[int]]:
    order, offsets = pack(np.array(lengths, dtype=np.int64), capacity)
    return [order[a:b].tolist() for a, b in pairwise(offsets)]


def counts_of(lengths: list[int], capacity: int = CAPACITY) -> np.ndarray:
    return np.bincount(np.array(lengths, dtype=np.int64), minlength=capacity + 1)


def plain_rows(lengths: list[int], best: bool, capacity: int = CAPACITY) -> list[int]:
    """Free space of each row by the quadratic algorithm: best fit decreasing, or first fit decreasing."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(free) if room >= length]
        if not fitting:
            free.append(capacity - length)
        else:
            free[min(fitting, key=lambda i: free[i]) if best else fitting[0]] -= length
    return free


def fewest_rows(lengths: list[int], capacity: int) -> int:
    """The true optimum, by trying every set of items for the row of the first item that is left."""

    @cache
    def solve(left: int) -> int:
        if not left:
            return 0
        first = left & -left
        rest = left ^ first
        best, chosen = len(lengths), rest
        while True:
            if sum(lengths[i] for i in range(len(lengths)) if (chosen | first) >> i & 1) <= capacity:
                best = min(best, 1 + solve(rest ^ chosen))
            if not chosen:
                return best
            chosen = (chosen - 1) & rest

    return solve((1 << len(lengths)) - 1)


@settings(max_examples=150, deadline=None)
@given(st.one_of(LENGTHS, MIDDLE))
def test_every_item_lies_once_in_a_row_within_capacity(lengths: list[int]) -> None:
    rows = records_of(lengths)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    for row in rows:
        assert 0 < sum(lengths[item] for item in row) <= CAPACITY
        assert row == sorted(row)
    assert rows == records_of(lengths)


@settings(max_examples=150, deadline=None)
@given(st.one_of(LENGTHS, MIDDLE).filter(bool))
def test_each_way_hands_out_every_item_and_counting_gives_what_the_plain_algorithms_give(lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    for fill, best in zip(_FILLS, (True, False, None), strict=True):
        order, offsets = _hand_out(sizes, CAPACITY, fill(counts_of(lengths)))
        assert sorted(order.tolist()) == list(range(len(lengths)))
        free = [CAPACITY - int(sizes[order[a:b]].sum()) for a, b in pairwise(offsets)]
        assert all(0 <= left < CAPACITY for left in free)
        assert best is None or sorted(free) == sorted(plain_rows(lengths, best))


@settings(max_examples=200, deadline=None)
@given(st.one_of(LENGTHS, MIDDLE))
def test_never_more_rows_than_best_fit_or_first_fit_nor_fewer_than_the_bound(lengths: list[int]) -> None:
    found = len(records_of(lengths))
    assert found <= min(len(plain_rows(lengths, True)), len(plain_rows(lengths, False)))
    assert found >= lower_bound(counts_of(lengths)) >= -(-sum(lengths) // CAPACITY)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 20))
def test_the_bound_holds_for_every_packing_there_is(lengths: list[int], capacity: int) -> None:
    fewest = fewest_rows(lengths, capacity)
    assert lower_bound(counts_of(lengths, capacity)) <= fewest <= len(records_of(lengths, capacity))


@pytest.mark.parametrize(("lengths", "bound"), cases(__file__, "long_items_do_not_share"))
def test_the_bound_knows_that_long_items_do_not_share(lengths: list[int], bound: int) -> None:
    assert lower_bound(counts_of(lengths)) == bound == fewest_rows(lengths, CAPACITY)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.randoms(use_true_random=False))
def test_the_rows_follow_from_the_multiset_of_lengths(lengths: list[int], random: object) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    def kinds(of: list[int]) -> list[list[int]]:
        return sorted(sorted(of[item] for item in row) for row in records_of(of))

    assert kinds(lengths) == kinds(shuffled)


def test_equal_items_are_handed_out_in_order() -> None:
    assert records_of([15, 7, 15, 7, 15, 15], 30) == [[0, 2], [4, 5], [1, 3]]


def test_completing_rows_exactly_finds_what_greedy_packing_misses() -> None:
    lengths = [14, 8, 8, 13, 9, 8, 12, 10, 8, 11, 10, 9]
    assert len(plain_rows(lengths, True)) == len(plain_rows(lengths, False)) == 5
    assert len(records_of(lengths)) == fewest_rows(lengths, CAPACITY) == 4


@pytest.mark.parametrize("kind", ["lognormal", "hard"])
@pytest.mark.parametrize("capacity", [4096, 8192, 32768])
def test_many_items_need_no_more_rows_than_the_bound(kind: str, capacity: int) -> None:
    rng = np.random.default_rng(7)
    if kind == "lognormal":
        lengths = np.clip(rng.lognormal(np.log(400), 1.2, 100_000).astype(np.int64), 1, capacity)
    else:
        long = rng.integers(capacity // 2 + 1, capacity + 1, 40_000)
        lengths = np.concatenate([long, rng.integers(1, capacity // 2 + 1, 20_000)])
    order, offsets = pack(lengths, capacity)
    assert np.array_equal(np.sort(order), np.arange(len(lengths)))
    assert np.add.reduceat(lengths[order], offsets[:-1]).max() <= capacity
    assert lower_bound(np.bincount(lengths, minlength=capacity + 1)) / (len(offsets) - 1) >= 0.9999


@pytest.mark.parametrize("lengths", [[0, 3], [31], [-1]])
def test_impossible_lengths_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="items of 1 to 30 tokens"):
        pack(np.array(lengths, dtype=np.int64), CAPACITY)
