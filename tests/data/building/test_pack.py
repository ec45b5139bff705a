"""Packing: bins, documents cut to segments, rows of them, and rows of more documents than are packed at once."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.data.batches import GlobalBatches
from tuner.data.building import pack as packing
from tuner.data.building.bins import _FILLS, _hand_out, lower_bound, pack
from tuner.data.building.pack import NO_TARGET, TOO_LONG, Segments, cut, in_blocks, in_order, row_batches
from tuner.data.building.prepare import prepare
from tuner.data.building.rows import segments_of, write_rows
from tuner.data.prepared import COUNTS, ROWS_SCHEMA, PackedRows, open_prepared, open_stream, row_counts
from tuner.errors import DataError

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


def made_of(lengths: list[int] | np.ndarray) -> Segments:
    """A document for each length, of which all but the first token are trained."""
    tokens = np.array(lengths, dtype=np.uint32)
    return Segments(np.arange(len(tokens), dtype=np.uint32), np.zeros_like(tokens), tokens, tokens - 1)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(2, 12), max_size=40), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_small_batches_hold_the_same_rows(lengths: list[int], max_rows: int, max_segments: int, packing: bool) -> None:
    segments = made_of(lengths)
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
    (row,) = rows_table(made_of([length]), length, packing=False).to_pylist()
    assert row == {
        "document": [0], "start": [0], "stop": [length],
        "tokens": length, "trained": length - 1, "squares": length**2,
    }  # fmt: skip


def test_more_than_2_to_the_31_tokens_are_counted() -> None:
    """As many tokens as a split of 5 GB of text has, without their memory: the columns are all there is of them."""
    table = rows_table(made_of([1 << 20] * 4100), 1 << 21, packing=True)
    tokens = np.asarray(table["tokens"].to_numpy(), dtype=np.int64)
    assert tokens.sum() == 4100 << 20 > 1 << 31
    assert tokens.tolist() == [1 << 21] * 2050


def test_no_document_gives_no_segment() -> None:
    nothing = cut(iter([]), 8, "split")
    assert (len(nothing.document), nothing.dropped) == (0, {})


FLAGS = st.lists(st.booleans(), min_size=1, max_size=12)
WAYS = {
    "truncate": partial(cut, max_length=6, too_long="truncate"),
    "drop": partial(cut, max_length=6, too_long="drop"),
    "split": partial(cut, max_length=6, too_long="split", min_piece=2),
    "pairs": partial(cut, max_length=12, too_long="truncate", each=2, max_prompt=3),
    "cut": partial(in_order, max_length=6),
}


def batches(masks: list[list[bool]], size: int) -> Iterator[pa.RecordBatch]:
    return (batch(masks[start : start + size]) for start in range(0, len(masks), size))


def rows_of(segments: Segments) -> list[Any]:
    """Every row that is decided: those of `data.rows: cut`, else each segment."""
    found = row_batches(segments, 12, packing=False)
    return [row for part in found for row in part.to_pylist()]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WAYS)), st.lists(FLAGS, min_size=1, max_size=24), st.integers(1, 9), st.integers(1, 3))
def test_blocks_have_the_segments_of_the_whole(way: str, masks: list[list[bool]], most: int, size: int) -> None:
    masks, cuts = masks * 2, WAYS[way]  # pairs are whole
    whole = cuts(batches(masks, 2 * size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_SEGMENTS", most)
        blocks = list(segments_of(batches(masks, 2 * size), 6, cuts))
    assert [row for block in blocks for row in rows_of(block)] == rows_of(whole)
    for counted in ("losses", "dropped"):
        assert sum((getattr(block, counted) for block in blocks), Counter()) == getattr(whole, counted)
    assert blocks[-1].carried.documents == len(masks)


def test_a_block_ends_by_its_documents_and_by_their_tokens() -> None:
    def sizes(most: int) -> list[int]:
        masks = [[True] * 2] * 6 + [[True] * 40] * 2  # a long one counts as 1 + 4
        return [sum(part.num_rows for part in block) for block in in_blocks(batches(masks, 1), 10, most)]

    assert sizes(3) == [3, 3, 1, 1]
    assert sizes(16) == [8]
    assert sum(1 for _ in in_blocks(iter([]), 10)) == 0
    assert packing.BLOCK_SEGMENTS == 1 << 25, "another number gives other rows to what was prepared with it"


def written(path: Path, lengths: np.ndarray, blocks: int) -> dict[str, Any]:
    return write_rows(path / f"{blocks}.rows.arrow", (made_of(part) for part in np.split(lengths, blocks)), 4096)


def lognormal(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(np.log(400), 0.9, count), 1, 4096).astype(np.int64)


def test_rows_of_blocks_are_full(tmp_path: Path) -> None:
    lengths = lognormal(1 << 17)
    for blocks in (1, 8):
        report = written(tmp_path, lengths, blocks)
        assert (report["packed_tokens"], report.get("blocks", 1)) == (lengths.sum(), blocks)
        assert report["fill"] > 0.9995
        assert row_counts(tmp_path / f"{blocks}.rows.arrow").exists() == (blocks > 1)


def test_the_memory_is_that_of_one_block(tmp_path: Path) -> None:
    lengths = lognormal(1 << 18) // 256 * 256 + 256  # few lengths, whose steps are few objects
    peaks = {}
    for blocks in (1, 8):
        tracemalloc.start()
        written(tmp_path, np.minimum(lengths, 4096), blocks)
        peaks[blocks] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[8] < peaks[1] / 3, peaks


@pytest.mark.parametrize("pretrain", ["cut", "packed"])
def test_prepared_in_blocks(pretrain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [{"text": f"text {i}" + " very" * (i % 23)} for i in range(60)]
    paths = [str(tiny.write_rows(tmp_path / f"{i}.jsonl", texts[i::3])) for i in range(3)]
    more: dict[str, Any] = {"rows": "cut"} if pretrain == "cut" else {"pack_sources": "apart"}
    monkeypatch.setattr("tuner.data.building.documents.BUNDLE_BYTES", 400)
    monkeypatch.setattr("tuner.data.reading.json_blocks.BLOCK_BYTES", 400)

    def opened(name: str) -> tuple[dict[str, Any], PackedRows, Path]:
        request = tiny.request(tmp_path / name, paths, pretrain=True, max_length=64, **more)
        info = prepare(request)
        return info.report["train"], open_prepared(info.path, verify=True).train, info.path

    whole, rows, at = opened("whole")
    assert ("blocks" in whole, rows.is_large, (at / "train.counts.i64").exists()) == (False, False, False)
    monkeypatch.setattr(packing, "BLOCK_SEGMENTS", 20)
    report, large, path = opened("blocks")
    assert report["blocks"] > 2
    assert large.is_large
    same = ("packed_documents", "packed_tokens", "packed_trained", "split")
    assert [report[name] for name in same] == [whole[name] for name in same]
    assert sorted(large.document_numbers) == sorted(rows.document_numbers)
    if pretrain == "cut":
        assert open_stream(path / "train.rows.arrow") == open_stream(at / "train.rows.arrow")
    else:
        of_each = np.cumsum([20, 20, 20])
        sources = [set(np.searchsorted(of_each, row.documents, side="right")) for row in large]
        assert all(len(found) == 1 for found in sources)
    table = open_stream(path / "train.rows.arrow")
    for name in COUNTS[:3]:
        assert getattr(large, f"{name}_per_row").tolist() == table[name].to_pylist(), name
    assert large.documents_per_row.tolist() == [len(row) for row in table["document"].to_pylist()]
    found = [
        GlobalBatches(large, seed=1, shuffle=True, global_batch_size=3, micro_batch_size=1, rank=rank, world_size=3)
        for rank in range(3)
    ]
    trained = sum(b.trained_positions.size for of in found for i in range(of.steps_per_epoch) for b in of.step(i).micro)
    assert trained == report["packed_trained"]
    (path / "train.counts.i64").write_bytes(bytes(32))
    with pytest.raises(DataError, match=r"train\.counts\.i64"):
        open_prepared(path)
