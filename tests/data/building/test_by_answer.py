"""Rows of several documents: counted, packed, held out and shown."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import families, tiny
from tests.data.building.test_sampling import digests
from tests.fixtures import commands
from tuner.config.numbers import Duration
from tuner.data.building.documents import explain
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.report import report_lines, warnings_of
from tuner.data.building.sampling import hold_out
from tuner.data.prepared import open_prepared
from tuner.errors import DataError


def chats(count: int, answers: int = 3, start: int = 0) -> list[dict[str, Any]]:
    """Chats of which each question names its chat: c12q0, c12q1, ..."""
    numbers = range(start, start + count)
    return [tiny.chat(*(f"c{i}{'qa'[k % 2]}{k // 2}" for k in range(2 * answers))) for i in numbers]


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> PreparedInfo:
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    request = tiny.request(
        tmp_path / "cache", path, tokenizer=families.tokenizer(families.CHANNELS), max_length=512, **data
    )
    return prepare(request)


def texts(info: PreparedInfo, split: str) -> list[str]:
    with pa.OSFile(str(info.path / f"{split}.documents.arrow")) as file, pa.ipc.open_stream(file) as stream:
        tokenizer = families.tokenizer(families.CHANNELS)
        return [tokenizer.decode(ids) for ids in stream.read_all()["input_ids"].to_pylist()]


def test_chats_and_documents_are_counted(tmp_path: Path) -> None:
    info = prepared(tmp_path, [*chats(4), *chats(2, 1, start=9), {"text": "hello"}, tiny.chat("only a question")])
    report = info.report
    assert report["by_answer"] == {"chats": 4, "documents": 12, "left_out": {}}
    assert report["masks"] == {"proven": 15, "rows": 8}
    train = report["train"]
    assert (train["rows"], train["documents"], train["dropped"]) == (8, 15, {"no trained token": 1})
    assert train["packed_documents"] == 15
    assert (report["sources"]["train"][0]["rows"], report["sources"]["train"][0]["documents"]) == (8, 15)
    lines = report_lines(report, "sft", 512, True)
    assert ("masks", "verified for 15 documents of 8 rows") in lines
    assert ("answers", "12 documents of 4 chats, one for each answer as it is prompted for") in lines
    assert texts(info, "train")[2].count("<|start|>") == 6  # the chat whole, at its last answer
    assert len(open_prepared(info.path).train) == train["packed_rows"]


def test_answers_that_are_left_out_are_warned_about() -> None:
    reason = "the template writes the text before message N differently when it is a prompt"
    report = {"train": None, "eval": None, "sources": {}, "overlap": 0}
    report["by_answer"] = {"chats": 2, "documents": 3, "left_out": {reason: 1}}
    (warning,) = warnings_of(report, "rejects.jsonl")
    assert warning == f"1 answers of chats with others that are trained are left out: {reason}"


@pytest.mark.parametrize("share", [{}, {"weight": 0.5}, {"weight": 1.5}])
def test_documents_of_a_row_are_held_out_together(tmp_path: Path, share: dict[str, float]) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [*chats(30), *chats(30, 1, start=50)])
    tokenizer = families.tokenizer(families.CHANNELS)
    train = [{"path": str(path), **share}]
    info = prepare(tiny.request(tmp_path / "cache", train, tokenizer=tokenizer, max_length=512, eval="20 documents"))
    sides = [{text.split("<|message|>")[1].split("q")[0] for text in texts(info, split)} for split in ("train", "eval")]
    assert not sides[0] & sides[1]
    assert info.report["eval"]["documents"] == len(texts(info, "eval")) == 20
    assert info.report["eval"]["rows"] == len(sides[1])
    assert info.report["overlap"] == 0
    samples = open_prepared(info.path).samples
    assert all(sample.prompt_text.endswith("<|start|>assistant") for sample in samples)
    # Each is prompted with what a model is given at that turn, and not with a chat's first or last turn alone.
    assert {sample.prompt_text.count("<|start|>assistant") for sample in samples} == {1, 2, 3}


@given(
    documents=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=2, max_size=40),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_rows_and_equal_documents_are_never_divided(documents: list[list[int]], data: st.DataObject, seed: int) -> None:
    follows = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    rows = np.cumsum(~np.array(follows))
    table = digests(documents)
    try:
        held = hold_out(table, Duration(count=data.draw(st.integers(1, 9)), unit="documents"), seed, rows)
    except DataError:
        return  # too many that belong together, or none would be left
    for key in (rows.tolist(), [tuple(document) for document in documents]):
        sides: dict[Any, set[bool]] = {}
        for one, is_held in zip(key, held.tolist(), strict=True):
            sides.setdefault(one, set()).add(is_held)
        assert all(len(side) == 1 for side in sides.values())


@given(documents=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=2, max_size=40), seed=st.integers(0, 2**32))
def test_rows_of_one_document_are_held_out_as_documents(documents: list[list[int]], seed: int) -> None:
    table, split = digests([*documents, [1, 2, 3, 4]]), Duration(count=1, unit="documents")
    numbered = hold_out(table, split, seed, np.arange(len(table)))
    assert np.array_equal(numbered, hold_out(table, split, seed))


def test_explain_shows_every_document_of_the_first_rows(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [*chats(1, 2), *chats(2, 1, start=5)])
    request = tiny.request(tmp_path / "cache", path, tokenizer=families.tokenizer(families.CHANNELS))
    views = list(explain(request, 2))
    assert [(view.line, view.document, view.documents) for view in views] == [(1, 0, 2), (1, 1, 2), (2, 0, 1)]
    trained = ["".join(token.text for token in view.tokens if token.trained) for view in views]
    assert trained == [f"<|channel|>final<|message|>{answer}<|return|>" for answer in ("c0a0", "c0a1", "c5a0")]


def test_the_command_says_it(tmp_path: Path) -> None:
    tokenizer = families.tokenizer(families.CHANNELS)
    tokenizer.save(tmp_path / "model")
    tiny.write_rows(tmp_path / "rows.jsonl", chats(2))
    (tmp_path / "recipe.yaml").write_text("model: {name_or_path: ./model}\ndata: {train: rows.jsonl}\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return commands.tuner("prepare-data", *arguments, cwd=tmp_path, code=0, TUNER_CACHE=str(tmp_path / "cache"))

    done = run("--json")
    assert "6 documents of 2 chats, one for each answer" in done.stderr
    assert json.loads(done.stdout)["metrics"]["by_answer"] == {"chats": 2, "documents": 6, "left_out": {}}
    shown = [json.loads(line) for line in run("--explain", "1").stdout.splitlines()]
    assert [shown[0]["document"], shown[-1]["document"]] == [0, 2]
    assert {token["line"] for token in shown} == {1}
    assert sum(token["token"] == 0 for token in shown) == 3
