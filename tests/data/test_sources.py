from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data import tiny
from tuner.data.prepare import prepare
from tuner.data.problems import RowProblem
from tuner.data.rows import parse_row
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


def test_format_forces_the_form() -> None:
    row = {**tiny.chat("a", "b"), "text": "whole"}
    assert type(parse_row(row)).__name__ == "Conversation"
    assert type(parse_row(row, "text")).__name__ == "PlainText"
    with pytest.raises(RowProblem, match=r"no prompt \+ completion"):
        parse_row(row, "prompt_completion")
