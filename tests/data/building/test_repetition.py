"""Documents that repeat a pattern: found as by looking at each place, left out or masked, and counted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tuner.config.methods import DpoMethod
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.repetition import Repetition, repeating
from tuner.data.building.report import report_lines
from tuner.data.prepared import open_prepared
from tuner.errors import DataError


def repeats(document: list[int], limits: Repetition) -> bool:
    """Whether any place begins a pattern that is written once more than it may be."""
    return any(
        document[i : i + period] * (limits.max_count + 1) == document[i : i + period * (limits.max_count + 1)]
        for period in range(limits.min_period, limits.max_period + 1)
        for i in range(len(document))
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=8),
    st.integers(1, 3), st.integers(0, 2), st.integers(2, 4),
)  # fmt: skip
def test_what_repeats_is_found_as_by_looking_at_each_place(
    documents: list[list[int]], shortest: int, more: int, most: int
) -> None:
    limits = Repetition(shortest, shortest + more, most)
    ids = np.array([token for document in documents for token in document], dtype=np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    assert repeating(ids, offsets, limits).tolist() == [repeats(document, limits) for document in documents]


CLEAN, STUCK = "the answer is forty two", "the answer is" + " x y" * 9


@pytest.mark.parametrize("kind", ["texts", "chats", "pairs"])
def test_documents_that_repeat_are_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    make: Any = {"texts": lambda text: {"text": text}, "chats": lambda text: tiny.chat("hello", text)}.get(kind)
    make = make or (lambda text: {"prompt": "hello", "chosen": text, "rejected": "x"})
    path = tiny.write_rows(tmp_path / "rows.jsonl", [make(f"{text} {i}") for i in range(3) for text in (CLEAN, STUCK)])

    def prepared(most: int) -> PreparedInfo:
        request = tiny.request(tmp_path / "cache", path, pretrain=kind == "texts", repetition={"max_count": most})
        return prepare(replace(request, examples=DpoMethod().examples) if kind == "pairs" else request)

    info = prepared(8)
    train = info.report["train"]
    assert (train["documents"], train["dropped"]) == (3, {"repeats a pattern": 3})
    assert not any(" x y x y" in tiny.tokenizer().decode(row.input_ids) for row in open_prepared(info.path).train)
    assert info.warnings == (
        "data.train: 3 of 6 rows (50%) repeat a pattern of tokens too often (data.repetition), and are left out",
    )
    lines = dict(report_lines(info.report, "sft", 64, True))
    assert "3 dropped: repeats a pattern" in lines["train"]
    assert lines["masks"] == "verified for all 3 rows used"
    assert prepared(9).report["train"]["documents"] == 6  # as often as it is there
    tiny.write_rows(path, [make(STUCK)])
    with pytest.raises(DataError, match="nothing to train on in 1 row: 1 repeats a pattern") as caught:
        prepared(2)
    assert caught.value.hint is None


@pytest.mark.parametrize("rows", ["packed", "cut"])
def test_rows_of_arrays_keep_their_place_where_they_are_cut(tmp_path: Path, rows: str) -> None:
    ids = np.arange(10, 210, dtype=np.uint16) % 150
    ids[16:24] = 7
    np.save(tmp_path / "ids.npy", ids)
    source = {"path": str(tmp_path / "ids.npy"), "end_id": None}
    request = tiny.request(
        tmp_path / "cache", [source], pretrain=True, max_length=8, rows=rows, repetition={"max_count": 7}
    )
    info = prepare(request)
    found = sorted(tuple(row.input_ids.tolist()) for row in open_prepared(info.path).train)
    assert found == sorted(tuple(part) for part in ids.reshape(-1, 8).tolist() if part != [7] * 8)
    assert info.report["train"]["dropped"] == ({} if rows == "cut" else {"repeats a pattern": 1})
    assert list(info.report["notes"].values()) == ([1] if rows == "cut" else [])


