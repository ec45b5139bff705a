"""Lost documents and answers, repeated ones, and chats of a document for each answer: counted, warned of, held out."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import families, pairs, tiny
from tests.data.building.test_sampling import digests
from tests.data.reading.files import write_stream
from tests.fixtures import commands
from tuner.config.methods import DpoMethod
from tuner.config.numbers import Duration
from tuner.data.building.cache import valid
from tuner.data.building.documents import explain
from tuner.data.building.prepare import PreparedInfo, check_prepared, check_to_use, prepare, prepare_to_use
from tuner.data.building.repetition import Repetition, repeating
from tuner.data.building.report import WHOLE, lengths_that_keep, report_lines, warnings_of
from tuner.data.building.sampling import hold_out
from tuner.data.encoding.tokenizer_files import template_source
from tuner.data.prepared import open_prepared
from tuner.errors import DataError
from tuner.runtime.console import Console


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60), batch=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_named_length_is_the_least_that_keeps_the_share(
    lengths: list[int], batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = pa.table({"input_ids": pa.array([[0] * length for length in lengths], pa.list_(pa.uint16()))})
    path = write_stream(tmp_path_factory.mktemp("documents") / "d.arrow", documents, batch)
    for share, length in zip(WHOLE, lengths_that_keep(path, WHOLE), strict=True):
        assert sum(n < length for n in lengths) < share * len(lengths) <= sum(n <= length for n in lengths)


def rows(count: int, words: int) -> list[dict[str, Any]]:
    return [tiny.chat(f"question {i}", f"answer {i}" + " very" * words) for i in range(count)]


def prepared(tmp_path: Path, short: int, long: int, **data: Any) -> PreparedInfo:
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows(short, 1) + rows(long, 60))
    return prepare(tiny.request(tmp_path / "cache", path, max_length=64, **data))


def test_little_is_not_worth_a_warning(tmp_path: Path) -> None:
    assert prepared(tmp_path, 98, 2).warnings == ()
    assert prepared(tmp_path, 0, 40, too_long="split").warnings == ()


@pytest.mark.parametrize(("too_long", "what"), [("auto", "dropped"), ("drop", "dropped"), ("truncate", "cut")])
def test_many_are_warned_of_with_the_lengths_that_keep_them(tmp_path: Path, too_long: str, what: str) -> None:
    info = prepared(tmp_path, 90, 10, too_long=too_long)
    longest = info.report["train"]["longest"]
    (warning,) = info.warnings
    assert warning == (
        f"data.train: 10 of 100 documents (10%) are {what}: longer than data.max_length (64); "
        f"data.max_length: {longest} keeps 99% of them whole"
    )
    again = prepared(tmp_path, 90, 10, too_long=too_long)
    assert (again.cached, again.warnings) == (True, info.warnings)
    kept = prepare(tiny.request(tmp_path / "cache", tmp_path / "rows.jsonl", max_length=longest, too_long=too_long))
    assert kept.warnings == ()


def test_most_are_an_error_unless_the_recipe_says_so_itself(tmp_path: Path) -> None:
    for _ in range(2):  # the second time the directory is there
        with pytest.raises(
            DataError, match=r"data\.train: 60 of 100 documents \(60%\) are dropped: .* keeps 99%"
        ) as caught:
            prepared(tmp_path, 40, 60)
        assert "write data.max_length: " in str(caught.value.hint) and "too_long: truncate" in str(caught.value.hint)
    spec = tiny.request(tmp_path / "cache", tmp_path / "rows.jsonl", max_length=64)
    with pytest.raises(DataError, match="60 of 100"):
        check_prepared(spec)
    (warning,) = prepared(tmp_path, 40, 60, too_long="drop").warnings
    assert "60 of 100 documents (60%) are dropped" in warning
    with pytest.raises(DataError, match="60 of 100 .*; the model has 70 positions") as caught:
        prepare(replace(spec, positions=70))
    assert "data.max_length" not in str(caught.value.hint)


def test_nothing_of_it_is_kept_in_the_directory(tmp_path: Path) -> None:
    """What an earlier version prepared has the same manifest, and is judged alike."""
    info = prepared(tmp_path, 90, 10)
    manifest = valid(info.path, "prepared")
    assert manifest is not None
    assert "whole" not in json.dumps(manifest) and "warnings" not in manifest["report"]


def test_a_training_says_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = prepared(tmp_path, 90, 10)
    spec = tiny.request(tmp_path / "cache", tmp_path / "rows.jsonl", max_length=64)
    assert prepare_to_use(spec, Console()) == info.path
    assert f"warning   {info.warnings[0]}" in capsys.readouterr().err


def test_rows_without_an_answer_and_repeated_ones_are_warned_of(tmp_path: Path) -> None:
    only_asked = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows(20, 1) + rows(7, 1) + only_asked)
    info = prepare(tiny.request(tmp_path / "cache", path))
    assert info.warnings == (
        "data.train: 3 of 30 rows (10%) have no trained token, such as an answer, and are left out",
        "data.train: 7 of 27 documents (26%) are exact duplicates of others, which is no reason to leave them out",
    )
    said = dict(report_lines(info.report, "sft", 64, True))
    assert "  7 duplicates kept" in said["train"]
    info.report["train"]["duplicates"] = 1
    one = dict(report_lines(info.report, "sft", 64, True))["train"]
    assert one == said["train"].replace("7 duplicates", "1 duplicate")
    masks = said["masks"]
    assert masks == "verified for all 27 rows used; 3 rows skipped or without an answer"


def test_rows_of_a_rare_form_are_counted_and_warned_of(tmp_path: Path) -> None:
    strays = [{"text": "a stray line"}]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows(21, 1) + strays)
    info = prepare(tiny.request(tmp_path / "cache", path))
    assert dict(report_lines(info.report, "sft", 64, True))["forms"] == "21 messages, 1 text"
    (warning,) = info.warnings
    assert warning.endswith(
        "1 text, the others messages: format: messages in the source makes them bad rows, with their lines"
    )
    with pytest.raises(DataError, match="rows.jsonl:22:1: no messages; the row has 'text'"):  # what it says
        prepare(tiny.request(tmp_path / "cache", {"path": str(path), "format": "messages"}))
    many = tiny.write_rows(tmp_path / "many.jsonl", rows(9, 1) + [{"text": f"stray {i}"} for i in range(3)])
    assert prepare(tiny.request(tmp_path / "cache", many)).warnings == ()
    apart = [str(tiny.write_rows(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate((rows(21, 1), strays))]
    assert prepare(tiny.request(tmp_path / "cache", apart)).warnings == ()  # a source of its own is meant
    assert "forms" not in dict(
        report_lines(prepare(tiny.request(tmp_path / "cache", apart[0])).report, "sft", 64, True)
    )


def test_tools_that_the_template_leaves_out_are_warned_of_with_a_template_that_has_them(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "look_up", "arguments": {"query": "x"}}]}
    asked = {"messages": [{"role": "user", "content": "q"}, call], "tools": [{"name": "look_up", "parameters": {}}]}
    path = tiny.write_rows(tmp_path / "rows.jsonl", [asked])
    request = tiny.request(tmp_path / "cache", path, max_length=512)
    (warning,) = prepare(request).warnings
    assert warning.startswith("1 row: tools not written by the template; the model would learn to call tools that it")
    assert "tokenizer.chat_template: chatml " in warning
    written = replace(request, tokenizer=tiny.tokenizer(template_source("qwen3")))
    assert prepare(written).warnings == ()


@pytest.mark.parametrize(("labels", "said"), [((True, True), "true"), ((False, False), "false"), ((True, False), "")])
def test_labels_of_one_kind_alone_are_warned_of(labels: tuple[bool, bool], said: str, tmp_path: Path) -> None:
    written = [{"prompt": f"q {i}", "completion": f"a {i}", "label": label} for i, label in enumerate(labels)]
    warnings = prepare(pairs.spec(tmp_path, written, pairs.UNPAIRED)).warnings
    told = f"data.train: all 2 answers are labelled {said}: there are none to tell them from"
    assert warnings == ((told,) if said else ())


def test_answers_beyond_a_row_are_warned_of(tmp_path: Path) -> None:
    late = [tiny.chat(f"question {i}" + " very" * 70, "answer") for i in range(5)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows(20, 1) + late)
    warnings = prepare(tiny.request(tmp_path / "cache", path, max_length=64, too_long="truncate")).warnings
    assert warnings[0] == (
        "data.train: 5 of 25 documents (20%) have no trained token within data.max_length and are left out: raise it"
    )


def test_a_cached_report_has_the_names_of_this_recipe(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for name in ("a", "b"):
        for place in ("here", "there"):
            tiny.write_rows(tmp_path / place / f"{name}.jsonl", [tiny.chat(f"{name} {i}", "yes") for i in range(3)])

    def sources(train: object, **data: Any) -> list[tuple[str, int]]:
        info = prepare(tiny.request(tmp_path / "cache", train, **data))
        return [(source["path"], source["documents"]) for source in info.report["sources"]["train"]]

    here, there = ([str(tmp_path / place / f"{name}.jsonl") for name in ("a", "b")] for place in ("here", "there"))
    assert sources(here) == [(here[0], 3), (here[1], 3)]
    assert sources(there) == [(there[0], 3), (there[1], 3)]


def test_a_named_directory_is_judged_like_one_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train --prepared DIR` gets the warnings, and the refusal, that preparing it gave."""
    info = prepared(tmp_path, 90, 10)
    request = tiny.request(tmp_path / "cache", tmp_path / "rows.jsonl", max_length=64)
    said: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda self, text: said.append(text))
    check_to_use(request, info.path, Console())
    assert tuple(said) == info.warnings != ()
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, 40, 60)
    lost = tmp_path / "cache" / "prepared"
    (other,) = (path for path in lost.iterdir() if path.is_dir() and path != info.path)
    with pytest.raises(DataError) as again:
        check_to_use(request, other, Console())
    assert again.value.message == caught.value.message


def test_rows_that_are_all_bad_are_not_answered_with_leaving_them_out(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [{"ask": "a", "reply": "b"}])
    with pytest.raises(DataError, match="nothing to train on in 1 row") as caught:
        prepare(tiny.request(tmp_path / "cache", path, on_bad_row="skip"))
    assert "columns: {" in str(caught.value.hint) and "skip" not in str(caught.value.hint)


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


def chats(count: int, answers: int = 3, start: int = 0) -> list[dict[str, Any]]:
    """Chats of which each question names its chat: c12q0, c12q1, ..."""
    numbers = range(start, start + count)
    return [tiny.chat(*(f"c{i}{'qa'[k % 2]}{k // 2}" for k in range(2 * answers))) for i in numbers]


def by_answer(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> PreparedInfo:
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
    info = by_answer(tmp_path, [*chats(4), *chats(2, 1, start=9), {"text": "hello"}, tiny.chat("only a question")])
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
