"""Rows that are short in the first steps: which tokens they keep, on every world size."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_batches import ROWS, FakeRows, batches
from tuner.data.batches import IGNORED, StepBatches
from tuner.train.length_warmup import GrowingBatches, RowLengths

WARMUP = RowLengths(steps=4, start=2, multiple_of=3, truncate=True, whole=14)


def test_lengths_grow_by_multiples_until_rows_are_whole() -> None:
    assert [WARMUP.length(step) for step in range(6)] == [2, 3, 6, 9, None, None]  # of 2, 5, 8 and 11
    assert [replace(WARMUP, multiple_of=1).length(step) for step in range(4)] == [2, 5, 8, 11]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(2, 9), st.booleans())
def test_a_row_is_cut_where_it_is_full(lengths: list[list[int]], length: int, truncate: bool) -> None:
    row = replace(FakeRows(lengths).row(0), columns={"margin": np.arange(len(lengths[0])) + 0.5})
    cut = replace(WARMUP, truncate=truncate).cut(row, length)
    expected: list[tuple[int, list[int]]] = []
    for place, number in enumerate(np.repeat(np.arange(len(lengths[0])), lengths[0]).tolist()):
        begins = place % length == 0 or number != expected[-1][0]
        if place < length or not truncate:
            expected += [(number, [])] if begins else []
            expected[-1][1].append(int(row.input_ids[place]))
    parts = np.split(cut.input_ids, np.cumsum(cut.lengths)[:-1])
    assert [(int(n), part.tolist()) for n, part in zip(cut.documents, parts, strict=True)] == expected
    assert cut.columns["margin"].tolist() == [number + 0.5 for number, _ in expected]
    assert cut.trained.tolist() == row.trained[: len(cut.input_ids)].tolist()


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 5), st.integers(1, 2), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_ranks_have_the_cut_rows_of_one_global_batch(
    lengths: list[list[int]], size: int, micro: int, world: int, begun: int, truncate: bool
) -> None:
    rows, warmup = FakeRows(lengths), replace(WARMUP, truncate=truncate)
    plain = [batches(rows, size, micro, rank, world) for rank in range(world)]
    growing = [GrowingBatches.of(each, warmup, begun) for each in plain]
    for i in range(6):
        steps: list[StepBatches] = [each.step(i) for each in growing]
        real = [batch for step in steps for batch in step.micro if len(batch.documents)]
        whole, length = plain[0].step(i), warmup.length(begun + i)
        kept = [rows.row(int(n)) if length is None else warmup.cut(rows.row(int(n)), length) for n in whole.row_ids]
        ids = sorted(int(token) for row in kept for token in row.input_ids)
        assert sorted(token for batch in real for token in batch.input_ids.tolist()) == ids
        assert len({len(step.micro) for step in steps}) == 1
        for step in steps:
            assert step.row_ids.tolist() == whole.row_ids.tolist()
            assert (step.tokens, step.documents) == (len(ids), sum(len(row.documents) for row in kept))
            assert step.trained_count == sum(int((batch.targets != IGNORED).sum()) for batch in real)
