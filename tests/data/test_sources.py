from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tuner.config.recipe import DataSource
from tuner.data import sources
from tuner.data.prepare import prepare
from tuner.data.problems import RowProblem
from tuner.data.rows import parse_row
from tuner.data.sources import expand, parse_json_row, read_rows
from tuner.errors import DataError

GOOD = json.dumps(tiny.chat("hi", "hello")).encode()
BAD_LINES = [
    (b'{"messages": [}', 15, "not JSON"),
    (b"[1, 2]", 1, "got list; a JSON array"),
    (b'"text"', 1, "got str"),
    (b'{"text": "a\xff"}', 12, "not UTF-8: byte 0xff"),
    (b'{"text": "a\x00"}', 12, "Invalid control character"),
    (b'{"text": "a\\u0000"}', 12, "NUL character"),
    (b'{"text": "a\\ud800b"}', 12, "lone surrogate"),
    (b'{"text": "\\ude00"}', 11, "lone surrogate"),
    (b'{"text": "a", "text": "b"}', 15, "duplicate key 'text'"),
    (b'{"a": [{"b": 1, "b": 2}], "text": "b"}', 17, "duplicate key 'b'"),
    (b'{"text": "NaN", "x": NaN}', 22, "NaN is not JSON"),
    (b'{"text": "a", "x": -Infinity}', 20, "-Infinity is not JSON"),
    (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1, "nested too deeply"),
    (b'{"txt": "a"}', 1, "did you mean 'text'"),
    (b"{}", 1, "no keys"),
    (b'{"text": 3}', 10, "text is a string, got a number"),
    (b'{"text": ""}', 10, "text is empty"),
    (b'{"messages": {}}', 14, "messages is a list"),
    (b'{"messages": []}', 14, "messages is empty"),
    (b'{"messages": ["a"]}', 15, "a message is an object"),
    (b'{"messages": [{"role": "human", "content": "a"}]}', 24, "unknown role 'human'"),
    (b'{"messages": [{"role": "user"}]}', 15, "content is a string, got null"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', 44, "only text parts"),
    (b'{"messages": [{"role": "user", "content": "a", "train": 1}]}', 57, "train is true or false"),
    (b'{"prompt": "a", "completion": null}', 31, "completion is a string, got null"),
    (b'{"text": "a <|im_end|>"}', 10, "control token <|im_end|>"),
]


@pytest.mark.parametrize(("line", "col", "reason"), BAD_LINES)
def test_bad_rows_are_named_or_skipped(tmp_path: Path, line: bytes, col: int, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\r\n" + GOOD)
    with pytest.raises(DataError) as caught:
        prepare(tiny.request(tmp_path / "cache", path))
    assert caught.value.message.startswith(f"{path}:3:{col}: ")
    assert reason in caught.value.message
    assert caught.value.hint is not None
    info = prepare(tiny.request(tmp_path / "cache", path, on_bad_row="skip"))
    assert sum(info.report["train"]["skipped"].values()) == 1
    assert (info.report["train"]["rows"], info.report["train"]["documents"]) == (3, 2)
    (reject,) = [json.loads(entry) for entry in (info.path / "rejects.jsonl").read_text().splitlines()]
    assert (reject["file"], reject["line"], reject["col"]) == (str(path), 3, col)
    assert reason in reject["reason"]


def test_bom_crlf_line_separators_and_surrogate_pairs_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = "a\u2028b\u0085c"
    lines = [json.dumps({"text": text}, ensure_ascii=False), json.dumps({"text": "\U0001f642 \\u0000"})]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    (file,) = expand([DataSource(path=str(path))])
    rows = [row.value for row in read_rows(file)]
    assert rows == [{"text": text}, {"text": "\U0001f642 \\u0000"}]


def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 50)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 500 + b'"}\n{"text": "ok"}\n')
    (file,) = expand([DataSource(path=str(path))])
    first, second = read_rows(file)
    assert first.problem is not None
    assert "longer than" in first.problem.reason
    assert (second.line, second.value) == (2, {"text": "ok"})


def test_text_files_are_documents_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "b.txt").write_text("\n  \n")
    files = expand([DataSource(path=str(tmp_path / "*.*"))])
    assert [row.value for file in files for row in read_rows(file)] == [{"text": "one\ntwo\n"}]
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    text = "line one\nline two\n\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\U0001f642\n"
    (tmp_path / "c.txt").write_text(text, encoding="utf-8")
    (file,) = expand([DataSource(path=str(tmp_path / "c.txt"))])
    rows = list(read_rows(file))
    assert "".join(row.value["text"] for row in rows if row.value) == text
    assert [row.line for row in rows][:3] == [1, 2, 3]
    (tmp_path / "d.txt").write_bytes(b"ok\nab\xff")
    (file,) = expand([DataSource(path=str(tmp_path / "d.txt"))])
    (row,) = read_rows(file)
    assert row.problem is not None
    assert (row.line, row.problem.col) == (2, 3)


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(16, 40))
def test_pieces_join_to_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    text = "x" + text.replace("\0", "") + "y"
    path.write_bytes(text.encode())
    (file,) = expand([DataSource(path=str(path))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", size)
        rows = list(read_rows(file))
    joined = "".join(row.value["text"] for row in rows if row.value)
    assert all(row.problem is None for row in rows)
    assert joined.replace("\ufeff", "").split() == text.replace("\ufeff", "").split()


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    for path, reason in [("none.jsonl", "no such file"), ("*.jsonl", "no such file"), ("", "directory")]:
        with pytest.raises(DataError, match=reason):
            expand([DataSource(path=f"{tmp_path}/{path}")])
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(DataError, match="unknown kind of file"):
        expand([DataSource(path=str(tmp_path / "a.bin"))])
    assert expand([DataSource(path=str(tmp_path / "a.bin"), format="text")])[0].kind == "text"


def test_format_forces_the_form() -> None:
    row = {**tiny.chat("a", "b"), "text": "whole"}
    assert type(parse_row(row)).__name__ == "Conversation"
    assert type(parse_row(row, "text")).__name__ == "PlainText"
    with pytest.raises(RowProblem, match=r"no prompt \+ completion"):
        parse_row(row, "prompt_completion")


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_strict_rows_equal_json(value: object) -> None:
    text = json.dumps({"v": value})
    try:
        assert parse_json_row(text) == {"v": value}
    except RowProblem as problem:
        assert "NUL" in problem.reason or "surrogate" in problem.reason
