
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.data.batches import LINEAR_TOKENS, balance_rows, row_costs

COSTS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 10**12)), min_size=1, max_size=40)


def dealt(costs: list[int], world: int, room: int) -> list[list[list[int]]]:
    n_micro = math.ceil(len(costs) / (world * room))
    found = balance_rows(np.array(costs, dtype=np.int64), n_micro, world, room)
    return [[share.tolist() for share in shares] for shares in found]


def waited(costs: list[int], plan: list[list[list[int]]]) -> int:
    """What a step takes: in each micro-batch as long as the costliest cell."""
    return sum(max(sum(costs[i] for i in share) for share in shares) for shares in plan)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_dealt_once_within_the_room(costs: list[int], world: int, room: int) -> None:
    plan = dealt(costs, world, room)
    assert sorted(i for shares in plan for share in shares for i in share) == list(range(len(costs)))
    assert len(plan) == math.ceil(len(costs) / (world * room))
    for shares in plan:
        assert len(shares) == world
        assert all(len(share) <= room and share == sorted(share) for share in shares)
    assert plan == dealt(costs, world, room)


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 5), st.integers(1, 4))
def test_ranks_do_as_much_as_their_cells_allow(costs: list[int], world: int, room: int) -> None:
    """Over the step, no two ranks are further apart than the cells of one micro-batch are."""
    if len(set(costs)) == 1:
        return
    loads = [[sum(costs[i] for i in share) for share in shares] for shares in dealt(costs, world, room)]
    totals = [sum(rank) for rank in zip(*loads, strict=True)]
    assert max(totals) - min(totals) <= max(max(load) - min(load) for load in loads)
    # Micro-batches lie in descending order: none holds a cell costlier than one of an earlier micro-batch.
    assert all(max(b) <= min(a) for a, b in itertools.pairwise(loads))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.integers(2, 3))
def test_with_one_row_a_cell_no_other_dealing_is_faster(costs: list[int], world: int) -> None:
    n_micro = math.ceil(len(costs) / world)
    places = n_micro * world
    fastest = min(
        sum(max(order[i : i + world]) for i in range(0, places, world))
        for order in itertools.permutations([*costs, *[0] * (places - len(costs))])
    )
    if len(set(costs)) > 1:
        assert waited(costs, dealt(costs, world, 1)) == fastest


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4))
def test_equal_rows_stay_in_their_order(n: int, world: int, room: int) -> None:
    plan = dealt([7] * n, world, room)
    assert [i for shares in plan for share in shares for i in share] == list(range(n))
    sizes = [len(share) for shares in plan for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_costliest_row_is_dealt_first() -> None:
    assert dealt([1, 1, 2], 2, 2) == [[[2], [0, 1]]]


@pytest.mark.parametrize(("world", "room"), [(2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 2)])
def test_waiting_nearly_vanishes_on_packed_rows(world: int, room: int) -> None:
    rng = np.random.default_rng(3)
    squares = (4096 * rng.lognormal(np.log(1000), 0.7, 256).clip(100, 4096)).astype(np.int64)
    costs = row_costs(np.full(256, 4096), squares).tolist()
    in_order = [[list(range(256))[i + r * room :][:room] for r in range(world)] for i in range(0, 256, world * room)]
    ideal = sum(costs) / world
    before, after = waited(costs, in_order) / ideal - 1, waited(costs, dealt(costs, world, room)) / ideal - 1
    assert 0 <= after < before / 4
    assert after < 0.01


def test_a_document_as_long_as_the_model_is_wide_twelve_times_costs_as_much_again() -> None:
    tokens = np.array([LINEAR_TOKENS, LINEAR_TOKENS, 100])
    one, many, short = row_costs(tokens, np.array([LINEAR_TOKENS**2, LINEAR_TOKENS, 100**2])).tolist()
    assert one == 2 * LINEAR_TOKENS**2
    assert many / LINEAR_TOKENS**2 == pytest.approx(1, rel=1e-4)
    assert short > 0
