
import json
import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.reading.cases import cases
from tests.fixtures import tables
from tuner.data.reading import jsonl
from tuner.data.reading.jsonl import fast_json_record, locate, parse_json_record, strict_json, strict_json_record
from tuner.data.reading.problems import RecordProblem


def nested(depth: int) -> bytes:
    """An object with a list inside a list, `depth` containers in all."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


DEEP = [
    (nested(jsonl.MAX_DEPTH + 1).decode(), 1, "nested too deeply"),
    (nested(100_000).decode(), 1, "nested too deeply"),
    ('{"a": ' + "1" * 5000 + "}", 1, "not JSON: Exceeds the limit"),
]
BAD = [*cases("bad_json", "raw", "col", "reason", name="reason"), *DEEP]
"""Texts of which each character stands for the byte of its number."""


@pytest.mark.parametrize(("text", "col", "reason"), BAD, ids=lambda value: str(value)[:30])
def test_bad_rows_have_a_reason_and_a_column(text: str, col: int, reason: str) -> None:
    raw = text.encode("latin-1")
    assert fast_json_record(raw) is None
    for parse in (parse_json_record, strict_json_record):
        with pytest.raises(RecordProblem) as caught:
            parse(raw)
        assert caught.value.reason.startswith(reason) or reason in caught.value.reason
        assert caught.value.col == col


GOOD: list[tuple[bytes, bool]] = [(text.encode(), fast) for text, fast in tables.cases(__file__, "good_rows")]
GOOD += [(nested(20), True), (nested(jsonl.MAX_DEPTH), False)]


@pytest.mark.parametrize(("raw", "fast"), GOOD, ids=lambda value: str(value)[:30])
def test_good_rows_equal_json_on_either_route(raw: bytes, fast: bool) -> None:
    expected = json.loads(raw)
    assert repr(parse_json_record(raw)) == repr(strict_json_record(raw)) == repr(expected)
    assert (fast_json_record(raw) is not None) == fast


def test_the_commonest_rows_take_the_fast_route() -> None:
    content = 'Sort it: use `sorted(x)`.\n\n```json\n{"key": "value", "n": 1}\n```\tC:\\dir\\ é\u2028'
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": content}]}
    for ascii_only in (True, False):
        for separators in ((",", ":"), (", ", ": ")):
            assert fast_json_record(json.dumps(row, ensure_ascii=ascii_only, separators=separators).encode()) == row


def agree(raw: bytes) -> bool:
    """Whether the fast route answered; if it did, the strict one gives the very same value."""
    value = fast_json_record(raw)
    if value is not None:
        assert repr(strict_json_record(raw)) == repr(value)
    return value is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_both_routes_give_what_was_written(value: object, ascii_only: bool, indent: int | None) -> None:
    try:
        raw = json.dumps({"v": value}, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return
    agree(raw)
    try:
        assert parse_json_record(raw) == {"v": value}
    except RecordProblem as problem:
        assert any(word in problem.reason for word in ("NUL", "surrogate", "NaN", "Infinity"))


ESCAPED = ["\\\\", "\\u003a", "\\u003A", "\\u0022", "\\u0000", "\\ud83d\\ude42", "\\ud83d"]
PIECES = st.lists(st.sampled_from(["a", ":", '\\":', '\\"', *ESCAPED, "é"]), max_size=4).map("".join)
SCALARS = st.sampled_from(["1", "-0", "1.5e3", "9" * 25, "1e400", "NaN", "true", "null", "-9223372036854775809"])
BLANKS = st.sampled_from(["", "", " ", "\t"])
MEMBERS = st.tuples(st.sampled_from(["a", "b", "c:", "d\\\\", "\\u0061", "e\\u003a", '\\"']), BLANKS, BLANKS)
TEXTS = st.recursive(
    PIECES.map(lambda text: f'"{text}"') | SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(MEMBERS, inner), max_size=4).map(
            lambda pairs: "{" + ",".join(f'"{key}"{one}:{two}{item}' for (key, one, two), item in pairs) + "}"
        )
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(MEMBERS, TEXTS), max_size=4))
@example([(("a", "", ""), '"\\u003a"'), (("a", "", ""), "1")])
def test_the_fast_route_never_overlooks_what_the_strict_one_sees(pairs: list[tuple[tuple[str, str, str], str]]) -> None:
    agree(("{" + ",".join(f'"{key}"{one}:{two}{item}' for (key, one, two), item in pairs) + "}").encode())


def test_damaged_rows_never_pass_the_fast_route_alone() -> None:
    generator = random.Random(7)
    rows = [raw for raw, _ in GOOD]
    rows += [text.encode("latin-1") for case in BAD[: -len(DEEP)] if (text := case.values[0])]
    answered = 0
    for _ in range(5000):
        raw = bytearray(generator.choice(rows) if generator.random() < 0.5 else b"".join(generator.sample(rows, 2)))
        for _ in range(generator.randrange(3)):
            raw[generator.randrange(len(raw))] = generator.choice(b'":,{}[]\\ \x00ab0\xc3')
        answered += agree(bytes(raw))
    assert answered > 200


def test_any_value_is_parsed_strictly() -> None:
    assert strict_json("[1, 2]") == [1, 2]
    assert math.isinf(strict_json("1e400"))
    with pytest.raises(RecordProblem, match="duplicate key"):
        strict_json('[{"a": 1, "a": 2}]')


@pytest.mark.parametrize(("path", "position"), tables.cases(__file__, "a_path_is_located"))
def test_a_path_is_located(path: list[str | int], position: int) -> None:
    assert locate('{"a": [1, {"b": "x,\\"}:"}], "c":3}', tuple(path)) == position


def test_a_problem_survives_the_way_between_processes() -> None:
    problem = RecordProblem("why", 3, ("a", 1))
    made, arguments = problem.__reduce__()
    copy = made(*arguments)
    assert (copy.reason, copy.col, copy.path, str(copy)) == ("why", 3, ("a", 1), "why")
