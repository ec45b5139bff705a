"""Single JSON rows, and values of Arrow tables as Python's: both routes give what was written, or a reason."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tests.data.reading.cases import cases
from tests.data.reading.files import one, values, write_stream
from tests.fixtures import tables
from tuner.config.methods import ExampleKind
from tuner.data.building.prepare import prepare
from tuner.data.reading import jsonl
from tuner.data.reading.blocks import blocks, examples_of
from tuner.data.reading.examples import NULLS
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


ROWS: dict[str, tuple[ExampleKind, list[dict[str, Any]]]] = {
    name: (case["kind"], case["rows"])
    for name, case in json.loads((Path(__file__).parent / "cases" / "tables.json").read_text(encoding="utf-8")).items()
}


def written(directory: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Write rows as tables in every way there is; the path of each."""
    import datasets

    table = pa.Table.from_pylist(rows)
    large = table.cast(pa.schema([(field.name, large_of(field.type)) for field in table.schema]))
    pq.write_table(large, directory / "large.parquet")
    pq.write_table(table, directory / "pyarrow.parquet", row_group_size=1)
    pyarrow.feather.write_feather(table, str(directory / "rows.feather"))
    write_stream(directory / "stream.arrow", table)
    with pa.ipc.new_file(str(directory / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    data_set = datasets.Dataset.from_list(rows)
    data_set.to_parquet(str(directory / "datasets.parquet"))
    data_set.save_to_disk(str(directory / "saved"))
    names = (
        "pyarrow.parquet", "large.parquet", "rows.feather", "stream.arrow", "file.arrow", "datasets.parquet", "saved"
    )
    return {name: str(directory / name) for name in names}


def large_of(kind: pa.DataType) -> pa.DataType:
    """The same type with lists and texts of 64-bit offsets."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, large_of(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.large_list(large_of(kind.value_type))
    return pa.large_string() if pa.types.is_string(kind) else kind


def read(path: str, kind: ExampleKind) -> list[Any]:
    return [example for block in blocks(one(Path(path))) for _, example in examples_of(block, kind)]


@pytest.mark.parametrize("case", ROWS)
def test_a_table_gives_what_its_rows_give(tmp_path: Path, case: str) -> None:
    kind, rows = ROWS[case]
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    meant = read(str(tmp_path / "rows.jsonl"), kind)
    assert not any(hasattr(example, "reason") for example in meant), meant
    for name, path in written(tmp_path, rows).items():
        assert read(path, kind) == meant, name


def read_back(table: pa.Table, path: Path) -> list[Any]:
    return values(one(write_stream(path, table)))


A, B = {"a": 1}, {"b": "x"}
STRUCT = pa.struct({"a": pa.int64(), "b": pa.string()})
MAP = pa.map_(pa.string(), STRUCT)
ARRAYS: dict[str, tuple[Any, list[Any]]] = {
    "a struct without any field is an empty object": (pa.array([{}, None, A], STRUCT), [{}, None, A]),
    "null elements of a list stay": (pa.array([[None, A], [], None], pa.list_(STRUCT)), [[None, A], [], None]),
    "a list of lists": (pa.array([[[A, None], None, [B]]], pa.list_(pa.list_(STRUCT))), [[[A, None], None, [B]]]),
    "a list of fixed size": (pa.array([[A, B], None], pa.list_(STRUCT, 2)), [[A, B], None]),
    "a view": (pa.array([[A, B], None], pa.list_view(STRUCT)), [[A, B], None]),
    "a map's nulls are its own": (
        pa.array([[("k", A), ("l", None)], None, []], MAP), [{"k": A, "l": None}, None, {}]
    ),
    "a map by numbers is its pairs": (
        pa.array([[(1, "x"), (2, None)]], pa.map_(pa.int64(), pa.string())), [[(1, "x"), (2, None)]]
    ),
    "a map in a struct": (
        pa.array([{"m": [("k", 1)]}, {"n": 2}], pa.struct({"m": pa.map_(pa.string(), pa.int8()), "n": pa.int8()})),
        [{"m": {"k": 1}}, {"n": 2}],
    ),
    "a dictionary of structs": (
        pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array([A, B], STRUCT)), [B, None, A]
    ),
    "a dictionary of texts": (pa.array([{"t": "x"}, {"t": None}]).cast(
        pa.struct({"t": pa.dictionary(pa.int32(), pa.string())})), [{"t": "x"}, {}]
    ),
    "runs of structs": (
        pa.RunEndEncodedArray.from_arrays([2, 3], pa.array([A, None], STRUCT)), [A, A, None]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRAYS)
def test_nulls_by_the_type_of_their_column(tmp_path: Path, case: str) -> None:
    array, plain = ARRAYS[case]
    assert read_back(pa.table({"v": array}), tmp_path / "a.arrow") == [{"v": value} for value in plain]
    inside = pa.StructArray.from_arrays([array, pa.nulls(len(array), pa.int8())], ["v", "empty"])
    kept = [{"v": value} if value is not None else {} for value in plain]
    assert read_back(pa.table({"w": inside}), tmp_path / "b.arrow") == [{"w": value} for value in kept]
    assert read_back(pa.table({"w": inside[1:]}), tmp_path / "c.arrow") == [{"w": value} for value in kept[1:]]


def test_json_in_a_table_keeps_its_nulls(tmp_path: Path) -> None:
    text = '{"a": null, "b": [{"c": null}]}'
    typed = pa.array([text, None]).cast(pa.json_())
    inside = pa.StructArray.from_arrays([typed, pa.array([None, "x"])], ["v", "t"])
    given_ = read_back(pa.table({"v": typed, "s": inside, "t": [text, None]}), tmp_path / "a.arrow")
    assert given_ == [
        {"v": json.loads(text), "s": {"v": json.loads(text)}, "t": text},
        {"v": None, "s": {"t": "x"}, "t": None},
    ]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (pa.array([[("k", 1), ("k", 2)], []], pa.map_(pa.string(), pa.int8())), "a map with two values of one key"),
        (pa.array(["{", "{}"]).cast(pa.json_()), "unexpected end of data"),
    ],
)
def test_a_bad_value_is_a_bad_row_and_the_next_one_is_read(tmp_path: Path, array: Any, reason: str) -> None:
    bad, good = read_back(pa.table({"v": array}), tmp_path / "a.arrow")
    assert reason in bad
    assert good == {"v": {}}


LEAVES = {
    "text": (pa.string(), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)),
    "number": (pa.int64(), st.integers(-9, 9)),
}
KINDS = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.one_of(
        st.tuples(st.just("list"), inner),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(lambda fields: ("struct", fields)),
    ),
    max_leaves=5,
)


def arrow_type(kind: Any) -> pa.DataType:
    if isinstance(kind, str):
        return LEAVES[kind][0]
    name, of = kind
    return pa.list_(arrow_type(of)) if name == "list" else pa.struct({key: arrow_type(of[key]) for key in of})


def value_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type: a struct has some of its keys and never null, a list may have null."""
    if isinstance(kind, str):
        return LEAVES[kind][1]
    name, of = kind
    if name == "list":
        return st.lists(st.none() | value_of(of), max_size=3)
    return st.fixed_dictionaries({}, optional={key: value_of(of[key]) for key in of})


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["parquet", "arrow"]))
def test_rows_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str
) -> None:
    kind = ("struct", data.draw(st.dictionaries(st.sampled_from("abcd"), KINDS, min_size=1, max_size=3)))
    rows = data.draw(st.lists(value_of(kind), min_size=1, max_size=5))
    schema = pa.schema([(name, arrow_type(of)) for name, of in kind[1].items()])
    path = tmp_path_factory.getbasetemp() / f"property.{suffix}"
    table = pa.Table.from_pylist(rows, schema)
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        write_stream(path, table)
    assert [{key: item for key, item in record.items() if item is not None} for record in values(one(path))] == rows


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + tiny.CHATML.replace(
    "message['content'] +", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +"
)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_a_table_fills_in_is_not_trained_and_in_json_lines_it_is_noted(tmp_path: Path, suffix: str) -> None:
    tokenizer = tiny.tokenizer(WITH_TOOLS)
    rows = ROWS["messages with tools"][1][:2]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    tiny.write_rows(tmp_path / "rows.jsonl", table.to_pylist())
    tiny.write_rows(tmp_path / "meant.jsonl", rows)
    spec = {
        name: tiny.request(tmp_path, tmp_path / name, tokenizer=tokenizer, max_length=2048)
        for name in (f"rows.{suffix}", "meant.jsonl")
    }
    found, meant = (prepare(each) for each in spec.values())
    notes = found.report["notes"].get(NULLS)
    same = found.report["train"]["packed_tokens"] == meant.report["train"]["packed_tokens"]
    assert (notes, same) == ((2, False) if suffix == "jsonl" else (None, True))
    assert NULLS not in meant.report["notes"]


@pytest.mark.parametrize(("row", "count"), tables.cases(__file__, "which_nulls_are_noted"))
def test_which_nulls_are_noted(tmp_path: Path, row: dict[str, Any], count: int) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [row, tiny.chat("q", "null")])
    info = prepare(tiny.request(tmp_path, path, tokenizer=tiny.tokenizer(WITH_TOOLS), max_length=2048))
    assert info.report["notes"].get(NULLS, 0) == count
