"""Rows to batches: shifted targets, their order, sizes that change, and each rank's share, evenly by cost."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.rows import InMemory
from tuner.data import batches as planned
from tuner.data.batch_sizes import BatchSizes, Change
from tuner.data.batches import IGNORED, GlobalBatches, balance_rows, collate, mixed_rows, row_costs, row_order
from tuner.data.prepared import Row


class FakeRows(InMemory):
    """Rows whose token ids name row and position."""

    is_large = False

    def __init__(self, lengths: list[list[int]]) -> None:
        self._lengths = lengths
        self._rows = [self._make(i) for i in range(len(lengths))]
        self.tokens_per_row = np.array([sum(row) for row in lengths], dtype=np.int64)
        self.documents_per_row = np.array([len(row) for row in lengths], dtype=np.int64)
        self.squares_per_row = np.array([sum(n * n for n in row) for row in lengths], dtype=np.int64)
        self.trained_per_row = np.array(
            [int((collate([row]).targets != IGNORED).sum()) for row in self._rows], dtype=np.int64
        )

    def _make(self, i: int) -> Row:
        n = sum(self._lengths[i])
        ids = i * 1000 + np.arange(n, dtype=np.int64)
        lengths = np.array(self._lengths[i], dtype=np.int32)
        return Row(ids, (ids * 7 + i) % 3 != 0, lengths, np.arange(len(lengths)))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> Row:
        return self._rows[i]


ROWS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=13)


def batches(rows: FakeRows, size: int, micro: int, rank: int, world: int) -> GlobalBatches:
    sizes = {"global_batch_size": size, "micro_batch_size": micro}
    return GlobalBatches(rows, seed=3, shuffle=True, rank=rank, world_size=world, **sizes)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 30), st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), max_size=3),
    st.fractions(min_value="1/7", max_value=4, max_denominator=7),
)
def test_batches_change_their_size_and_keep_the_order_of_rows(
    n_rows: int, first: int, later: list[tuple[int, int]], epochs: Fraction
) -> None:
    """Against a walk step by step: every epoch has each row once, whatever size comes when."""
    changes = [Change(sum(steps for steps, _ in later[: i + 1]), size) for i, (_, size) in enumerate(later)]
    sizes = BatchSizes(first, tuple(changes))
    found = batches(FakeRows([[1]] * n_rows), first, 1, 0, 1)
    found.sizes = sizes
    epoch, start, reached = 0, 0, None
    for step in range(60):
        size = next((change.size for change in reversed(changes) if step >= change.after), first)
        assert sizes.place(step, n_rows) == (epoch, start, size)
        if reached is None and epoch * n_rows + start >= epochs * n_rows:
            reached = step
        order = row_order(3, epoch, n_rows, True)
        assert found.row_ids(step).tolist() == order[start : start + size].tolist()
        start += size
        if start >= n_rows:
            epoch, start = epoch + 1, 0
    assert reached is None or sizes.steps(epochs * n_rows, n_rows) == reached


def test_collate_never_crosses_documents() -> None:
    rows = [
        Row(np.arange(5), np.ones(5, dtype=bool), np.array([2, 3], dtype=np.int32), np.array([7, 3])),
        Row(np.arange(10, 14), np.array([True, True, False, True]), np.array([4], dtype=np.int32), np.array([5])),
    ]
    batch = collate(rows)
    assert batch.input_ids.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13]
    assert batch.targets.tolist() == [1, -100, 3, 4, -100, 11, -100, 13, -100]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert batch.lengths == (2, 3, 4)
    assert batch.trained_positions.tolist() == [0, 2, 3, 5, 7]
    assert batch.documents.tolist() == [7, 3, 5]
    assert batch.input_ids.dtype == batch.targets.dtype == batch.trained_positions.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_targets_are_the_next_trained_token_of_the_same_document(lengths: list[list[int]]) -> None:
    rows = FakeRows(lengths)
    batch = collate([rows.row(i) for i in range(len(rows))])
    trained = np.concatenate([rows.row(i).trained for i in range(len(rows))])
    start = 0
    for length in batch.lengths:
        for t in range(start, start + length):
            inside = t + 1 < start + length
            assert batch.targets[t] == (batch.input_ids[t + 1] if inside and trained[t + 1] else IGNORED)
            assert batch.position_ids[t] == t - start
        start += length
    assert start == len(batch.input_ids)
    assert (np.flatnonzero(batch.targets != IGNORED) == batch.trained_positions).all()


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_ranks_make_up_the_global_batch(lengths: list[list[int]], size: int, micro: int, world: int) -> None:
    rows = FakeRows(lengths)
    ranks = [batches(rows, size, micro, rank, world) for rank in range(world)]
    one = batches(rows, size, len(rows), 0, 1)
    assert one.steps_per_epoch == -(-len(rows) // size)
    for i in range(2 * one.steps_per_epoch):
        steps = [rank.step(i) for rank in ranks]
        whole = one.step(i)
        assert len({len(step.micro) for step in steps}) == 1
        for step in steps:
            assert step.row_ids.tolist() == whole.row_ids.tolist()
            assert (step.trained_count, step.tokens) == (whole.trained_count, rows.tokens_per_row[whole.row_ids].sum())
            # A full micro-batch never holds more rows than asked for.
            assert all(len(set((batch.input_ids // 1000).tolist())) <= micro for batch in step.micro)
            assert len(step.micro) == -(-len(whole.row_ids) // (micro * world))
        dealt = [set((b.input_ids // 1000).tolist()) for step in steps for b in step.micro if len(b.trained_positions)]
        # No row is trained twice. A row without targets may serve as filler.
        assert sum(map(len, dealt)) == len(set().union(*dealt))
        targets = np.concatenate([b.targets[b.trained_positions] for step in steps for b in step.micro])
        expected = np.concatenate([b.targets[b.trained_positions] for b in whole.micro])
        assert sorted(targets.tolist()) == sorted(expected.tolist())
        assert len(targets) == whole.trained_count


def test_ranks_wait_less_than_with_rows_in_order() -> None:
    """Rows of 240 tokens in one document cost more than those in many: a rank with two of them waits for nobody."""
    rows = FakeRows([[240], [240], [40] * 6, [40] * 6, [240], [40] * 6, [240], [40] * 6])
    ranks = [batches(rows, 8, 1, rank, 2).step(0) for rank in range(2)]
    longest = [[max(batch.lengths) for batch in rank.micro] for rank in ranks]
    assert longest == [[240, 240, 40, 40]] * 2
    two = [batches(rows, 8, 2, rank, 2).step(0) for rank in range(2)]
    assert [[len(batch.lengths) for batch in rank.micro] for rank in two] == [[7, 7]] * 2


@pytest.mark.parametrize("lengths", [[6, 3, 5], [3, 5, 6], [5, 6, 3]])
def test_an_idle_cell_takes_the_cheapest_row(lengths: list[int]) -> None:
    rows = FakeRows([[length] for length in lengths])
    cells = [batches(rows, 3, 1, rank, 2).step(0).micro for rank in range(2)]
    found = [batch.lengths for rank in cells for batch in rank]
    assert sorted(length for (length,) in found) == [3, 3, 5, 6]


def test_a_rank_with_nothing_left_trains_nothing() -> None:
    rows = FakeRows([[4]])
    idle = batches(rows, 4, 2, 1, 2).step(0)
    assert len(idle.micro) == 1
    assert (idle.micro[0].targets == IGNORED).all()
    assert len(idle.micro[0].trained_positions) == 0
    assert len(idle.micro[0].documents) == len(idle.micro[0].trained_per_document) == 0
    assert len(idle.micro[0].input_ids) == 4
    assert idle.trained_count == rows.trained_per_row[0] > 0


def test_every_rank_knows_what_is_trained_in_each_document_of_the_global_batch() -> None:
    rows = FakeRows([[4, 2], [3], [1, 5], [2]])
    given = {"seed": 0, "shuffle": True, "global_batch_size": 3, "by_document": True}
    for step in range(2):
        ranks = [
            GlobalBatches(rows, micro_batch_size=1, rank=rank, world_size=2, **given).step(step)  # type: ignore[arg-type]
            for rank in range(2)
        ]
        wanted = [collate([rows.row(int(i))]).trained_per_document for i in ranks[0].row_ids]
        for one in ranks:
            assert one.trained_per_document is not None
            assert one.trained_per_document.tolist() == np.concatenate(wanted).tolist()
            assert one.trained_per_document.sum() == one.trained_count
        counted = np.concatenate([batch.trained_per_document for one in ranks for batch in one.micro])
        assert sorted(counted) == sorted(np.concatenate(wanted))


@pytest.mark.parametrize(("size", "micro", "rank", "world"), [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1)])
def test_impossible_sizes_are_refused(size: int, micro: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="batch sizes"):
        batches(FakeRows([[2]]), size, micro, rank, world)


def test_order_is_a_frozen_function_of_seed_and_epoch() -> None:
    assert row_order(42, 0, 8, False).tolist() == list(range(8))
    orders = {tuple(row_order(seed, epoch, 50, True).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert row_order(42, 0, 8, True).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert len(row_order(1, 0, 0, True)) == 0


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """The four words of Philox4x64-10 (Salmon et al. 2011) at a counter."""
    words, full = [counter, 0, 0, 0], 2**64 - 1
    for turn in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        keys = (key[0] + turn * 0x9E3779B97F4A7C15 & full, key[1] + turn * 0xBB67AE8584CAA73B & full)
        words = [second >> 64 ^ words[1] ^ keys[0], second & full, first >> 64 ^ words[3] ^ keys[1], first & full]
    return words


def test_order_is_that_of_the_formula_in_the_documents() -> None:
    """docs/packing.md, "The planner", worked out without numpy's generator."""
    for seed, epoch, rows in ((42, 0, 8), (2**64 - 1, 3, 1001), (7, 2, 1)):
        words = [philox(i // 4 + 1, (seed, epoch))[i % 4] for i in range(rows)]
        assert row_order(seed, epoch, rows, True).tolist() == sorted(range(rows), key=words.__getitem__)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**33))
def test_a_mixed_order_has_each_row_once(n_rows: int, seed: int, epoch: int) -> None:
    order = mixed_rows(seed, epoch, n_rows, np.arange(n_rows))
    assert sorted(order.tolist()) == list(range(n_rows))
    assert mixed_rows(seed, epoch, n_rows, np.array([n_rows // 2])).tolist() == [order[n_rows // 2]]


def test_a_mixed_order_is_as_random_as_a_sorted_one() -> None:
    """Where rows end up, which follow each other, and how epochs and seeds differ: uniform to chance."""
    n, parts = 100_003, 50
    orders = [mixed_rows(seed, epoch, n, np.arange(n)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        table = np.histogram2d(np.arange(n), order, bins=parts)[0]
        steps = np.histogram(np.diff(order) % n, bins=parts * parts)[0]
        for found in (table.ravel(), steps):  # chi-square of 2,500 bins: 2,500 with a deviation of 71
            assert 2150 < ((found - found.mean()) ** 2 / found.mean()).sum() < 2850
    for first, second in ((0, 1), (0, 2)):
        assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 0.02
        assert (orders[first] == orders[second]).sum() < 10
    # Bits that a resumed run depends on.
    assert orders[0][:5].tolist() == [7193, 55263, 31057, 53514, 52143]


@pytest.mark.parametrize("shuffle", [False, True])
def test_large_rows_come_in_an_order_that_nobody_holds(shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRows, "is_large", True)
    monkeypatch.setattr("tuner.data.batches.row_order", None)
    rows = FakeRows([[2]] * 40)
    one, two = (batches(rows, 7, 2, 0, world) for world in (1, 2))
    one.shuffle = two.shuffle = shuffle
    epochs = []
    for first in (0, one.steps_per_epoch):
        steps = [one.row_ids(first + i).tolist() for i in range(one.steps_per_epoch)]
        assert steps == [two.step(first + i).row_ids.tolist() for i in range(one.steps_per_epoch)]
        epochs.append([row for step in steps for row in step])
        assert sorted(epochs[-1]) == list(range(40))
    assert (epochs[0] == epochs[1], epochs[0] == sorted(epochs[0])) == (not shuffle, not shuffle)
    one.max_rows = 11
    one.switch_to(rows, 1)  # type: ignore[arg-type]
    assert sorted(np.concatenate([one.row_ids(0), one.row_ids(1)]).tolist()) == list(range(11))


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
    tokens = np.array([planned.LINEAR_TOKENS, planned.LINEAR_TOKENS, 100])
    one, many, short = row_costs(tokens, np.array([planned.LINEAR_TOKENS**2, planned.LINEAR_TOKENS, 100**2])).tolist()
    assert one == 2 * planned.LINEAR_TOKENS**2
    assert many / planned.LINEAR_TOKENS**2 == pytest.approx(1, rel=1e-4)
    assert short > 0
