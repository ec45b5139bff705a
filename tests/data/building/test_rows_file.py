"""Rows of more documents than are packed at once: blocks of them, their counts, and what each takes."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tests.data.building.test_pack import batch
from tests.data.building.test_pack import segments_of as made_of
from tuner.data.batches import GlobalBatches
from tuner.data.building import pack
from tuner.data.building.pack import Segments, cut, in_blocks, in_order, row_batches
from tuner.data.building.prepare import prepare
from tuner.data.building.rows import segments_of, write_rows
from tuner.data.prepared import COUNTS, PackedRows, open_prepared, open_stream, row_counts
from tuner.errors import DataError

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
        patch.setattr(pack, "BLOCK_SEGMENTS", most)
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
    assert pack.BLOCK_SEGMENTS == 1 << 25, "another number gives other rows to what was prepared with it"


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
    monkeypatch.setattr(pack, "BLOCK_SEGMENTS", 20)
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
