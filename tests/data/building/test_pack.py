
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.data.building.pack import NO_TARGET, TOO_LONG, Segments, cut, row_batches
from tuner.data.prepared import ROWS_SCHEMA


def rows_table(segments: Segments, max_length: int, packing: bool) -> pa.Table:
    return pa.Table.from_batches(row_batches(segments, max_length, packing), ROWS_SCHEMA)


def batch(masks: list[list[bool]]) -> pa.RecordBatch:
    ids = pa.array([list(range(len(mask))) for mask in masks], pa.list_(pa.uint16()))
    return pa.record_batch([ids, pa.array(masks, pa.list_(pa.bool_()))], names=["input_ids", "trained"])


def test_long_documents_follow_the_policy() -> None:
    masks = [[True] * 4, [True] * 10, [False] * 4 + [True] * 2]
    dropped = cut(iter([batch(masks)]), 4, "drop")
    assert dropped.document.tolist() == [0]
    assert dropped.dropped == {TOO_LONG: 2}
    truncated = cut(iter([batch(masks)]), 4, "truncate")
    assert (truncated.document.tolist(), truncated.stop.tolist()) == ([0, 1], [4, 4])
    assert (truncated.losses["truncated"], truncated.dropped) == (2, {NO_TARGET: 1})
    split = cut(iter([batch(masks)]), 4, "split")
    assert split.document.tolist() == [0, 1, 1, 1, 2]
    assert split.start.tolist() == [0, 0, 4, 8, 4]
    assert split.stop.tolist() == [4, 4, 8, 10, 6]
    # The first token of a segment is never a target.
    assert split.trained.tolist() == [3, 3, 3, 1, 1]
    assert (split.losses, split.dropped) == ({"split": 2, "dropped_pieces": 1, "dropped_piece_tokens": 4}, {})


def test_pieces_of_split_documents_that_train_nothing_are_counted() -> None:
    # A tail of one token, which nothing precedes; a prompt as long as a piece; a document of which nothing is left.
    masks = [[True] * 9, [False] * 4 + [True] * 5, [False] * 6]
    segments = cut(iter([batch(masks)]), 4, "split")
    assert segments.start.tolist() == [0, 4, 4]
    assert segments.losses == {"split": 3, "dropped_pieces": 3, "dropped_piece_tokens": 1 + 4 + 1}
    assert segments.dropped == {NO_TARGET: 1}
    for policy in ("truncate", "drop"):
        assert cut(iter([batch(masks)]), 4, policy).losses["dropped_pieces"] == 0


def test_short_last_pieces_are_left_out_and_counted() -> None:
    masks = [[True] * 10, [True] * 6, [True] * 2, [True] * 11, [True] * 9]  # the last one's tail trains nothing anyway
    segments = cut(iter([batch(masks)]), 4, "split", min_piece=3)
    assert list(zip(segments.document, segments.start, segments.tokens, strict=True)) == [
        (0, 0, 4), (0, 4, 4), (1, 0, 4), (2, 0, 2), (3, 0, 4), (3, 4, 4), (3, 8, 3), (4, 0, 4), (4, 4, 4),
    ]  # fmt: skip
    assert segments.losses == {"split": 4, "dropped_pieces": 3, "dropped_piece_tokens": 2 + 2 + 1}


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


@pytest.mark.parametrize("first", [0, 3, 8, 11])
def test_masks_that_begin_inside_a_byte_are_counted(first: int) -> None:
    """Offsets and flags may both be parts of larger arrays: of a sliced batch, or of one written that way."""
    flags = [i % 3 != 1 for i in range(60)]
    lists = pa.ListArray.from_arrays(pa.array([0, 4, 9, 10, 30, 40], pa.int32()), pa.array(flags).slice(first))
    whole = pa.record_batch([lists], names=["trained"])
    masks = lists.to_pylist()
    for start in range(len(masks)):
        segments = cut(iter([whole.slice(start)]), 7, "truncate")
        expected = [(i, sum(mask[1:7])) for i, mask in enumerate(masks[start:]) if any(mask[1:7])]
        assert list(zip(segments.document.tolist(), segments.trained.tolist(), strict=True)) == expected


def segments_of(lengths: list[int] | np.ndarray) -> Segments:
    """A document for each length, of which all but the first token are trained."""
    tokens = np.array(lengths, dtype=np.uint32)
    return Segments(np.arange(len(tokens), dtype=np.uint32), np.zeros_like(tokens), tokens, tokens - 1)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(2, 12), max_size=40), st.integers(1, 5), st.integers(1, 7), st.booleans()
)
def test_small_record_batches_hold_the_same_rows(
    lengths: list[int], max_rows: int, max_segments: int, packing: bool
) -> None:
    segments = segments_of(lengths)
    batches = list(row_batches(segments, 12, packing, (max_rows, max_segments)))
    for batch in batches:
        assert batch.schema == ROWS_SCHEMA
        assert 1 <= batch.num_rows <= max_rows
        # Each batch has list offsets of its own, from 0.
        assert batch["document"].offsets[0].as_py() == 0
        assert len(batch["document"].values) <= max_segments or batch.num_rows == 1
    table = pa.Table.from_batches(batches, ROWS_SCHEMA)
    assert table.to_pylist() == rows_table(segments, 12, packing).to_pylist()
    assert sorted(i for row in table["document"].to_pylist() for i in row) == list(range(len(lengths)))
    for row in table.to_pylist():
        sizes = [lengths[i] for i in row["document"]]
        assert row["stop"] == sizes
        assert (row["tokens"], row["squares"]) == (sum(sizes), sum(size**2 for size in sizes))
        assert row["trained"] == sum(sizes) - len(sizes)


def test_sums_of_a_row_are_not_cut_to_32_bits() -> None:
    length = 3_000_000_000
    (row,) = rows_table(segments_of([length]), length, packing=False).to_pylist()
    assert row == {
        "document": [0], "start": [0], "stop": [length],
        "tokens": length, "trained": length - 1, "squares": length**2,
    }  # fmt: skip


def test_more_than_2_to_the_31_tokens_are_counted() -> None:
    """As many tokens as a split of 5 GB of text has, without their memory: the columns are all there is of them."""
    table = rows_table(segments_of([1 << 20] * 4100), 1 << 21, packing=True)
    tokens = np.asarray(table["tokens"].to_numpy(), dtype=np.int64)
    assert tokens.sum() == 4100 << 20 > 1 << 31
    assert tokens.tolist() == [1 << 21] * 2050


def test_no_document_gives_no_segment() -> None:
    nothing = cut(iter([]), 8, "split")
    assert (len(nothing.document), nothing.dropped) == (0, {})
