from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.data.pack import NO_TARGET, TOO_LONG, cut, pack, rows_table


def batch(masks: list[list[bool]]) -> pa.RecordBatch:
    ids = pa.array([list(range(len(mask))) for mask in masks], pa.list_(pa.uint16()))
    return pa.record_batch([ids, pa.array(masks, pa.list_(pa.bool_()))], names=["input_ids", "trained"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=0, max_size=60))
def test_packing_places_every_item_once_within_capacity(lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    order, offsets = pack(sizes, 30)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
        assert 0 < sizes[order[start:stop]].sum() <= 30
        assert (np.diff(order[start:stop]) > 0).all()
    again = pack(sizes, 30)
    assert again[0].tolist() == order.tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_packing_is_best_fit_decreasing(lengths: list[int]) -> None:
    """The plain quadratic algorithm needs the same number of rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(free) if room >= length]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= length
        else:
            free.append(30 - length)
    order, offsets = pack(np.array(lengths, dtype=np.int64), 30)
    assert len(offsets) - 1 == len(free)
    sizes = np.array(lengths)[order]
    assert sorted(30 - int(sizes[a:b].sum()) for a, b in zip(offsets[:-1], offsets[1:], strict=True)) == sorted(free)


def test_many_documents_pack_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(10, 700, 20_000)
    _, offsets = pack(lengths, 1024)
    assert lengths.sum() / ((len(offsets) - 1) * 1024) > 0.999


def test_long_documents_follow_the_policy() -> None:
    masks = [[True] * 4, [True] * 10, [False] * 4 + [True] * 2]
    dropped = cut(iter([batch(masks)]), 4, "drop")
    assert dropped.document.tolist() == [0]
    assert dropped.dropped == {TOO_LONG: 2}
    truncated = cut(iter([batch(masks)]), 4, "truncate")
    assert (truncated.document.tolist(), truncated.stop.tolist()) == ([0, 1], [4, 4])
    assert (truncated.truncated, truncated.dropped) == (2, {NO_TARGET: 1})
    split = cut(iter([batch(masks)]), 4, "split")
    assert split.document.tolist() == [0, 1, 1, 1, 2]
    assert split.start.tolist() == [0, 0, 4, 8, 4]
    assert split.stop.tolist() == [4, 4, 8, 10, 6]
    # The first token of a segment is never a target.
    assert split.trained.tolist() == [3, 3, 3, 1, 1]
    assert (split.split, split.dropped) == (2, {})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(2, 8))
def test_split_counts_equal_a_plain_count(masks: list[list[bool]], size: int) -> None:
    half = len(masks) // 2
    parts = iter([batch(part) for part in (masks[:half], masks[half:]) if part])
    segments = cut(parts, size, "split")
    expected = [
        (document, start, min(start + size, len(mask)), sum(mask[start + 1 : start + size]))
        for document, mask in enumerate(masks)
        for start in range(0, len(mask), size)
        if any(mask[start + 1 : start + size])
    ]
    columns = (segments.document, segments.start, segments.stop, segments.trained)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


@pytest.mark.parametrize("packing", [True, False])
def test_rows_count_tokens_and_targets(packing: bool) -> None:
    segments = cut(iter([batch([[True] * 3, [False, True], [True] * 5])]), 5, "drop")
    table = rows_table(segments, 5, packing)
    assert table.num_rows == (2 if packing else 3)
    assert sum(table["tokens"].to_pylist()) == 10
    assert sum(table["trained"].to_pylist()) == 2 + 1 + 4
    if packing:
        assert table["document"].to_pylist() == [[2], [0, 1]]
