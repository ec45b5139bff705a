
import contextlib
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data import tiny
from tests.data.reading.cases import cases
from tests.data.reading.files import one, values, write, write_kind, write_stream
from tests.fixtures import tables
from tuner.data.reading import block as block_module
from tuner.data.reading import json_blocks, text_blocks
from tuner.data.reading import tables as table_module
from tuner.data.reading.block import Block, RawRecord
from tuner.data.reading.blocks import blocks, lines_in, position_of, records_of
from tuner.data.sources import SourceFile
from tuner.errors import DataError

SIZED = (block_module, json_blocks, text_blocks, table_module)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, rows of at most 200."""
    resize(monkeypatch, 64, 200)


def resize(patch: pytest.MonkeyPatch, block: int, line: int) -> None:
    for module in SIZED:
        patch.setattr(module, "BLOCK_BYTES", block, raising=False)
        patch.setattr(module, "LINE_BYTES", line, raising=False)


def all_rows(file: SourceFile) -> Iterator[tuple[int, RawRecord]]:
    """Each row with its line in the file."""
    before = 0
    for block in blocks(file):
        for row in records_of(block):
            yield before + row.line, row
        before += lines_in(block)


COMPRESSED = pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])


@COMPRESSED
def test_json_lines(tmp_path: Path, suffix: str, small: None) -> None:
    rows = [{"text": f"row {i} " + "x" * (i % 40)} for i in range(60)]
    lines = [json.dumps(row) for row in rows]
    lines[7:7] = ["", "  \t", "{", '{"text": "' + "y" * 300 + '"}', '{"text": "\u2028\u0085"}']
    data = b"\xef\xbb\xbf" + "\r\n".join(lines).encode()
    for ending in (b"", b"\n", b"\n\n"):
        file = write(tmp_path / f"rows.jsonl{suffix}", data + ending)
        cut = list(blocks(file))
        assert len(cut) > 10
        assert [block.index for block in cut] == list(range(len(cut)))
        found = list(all_rows(file))
        assert [row.value for _, row in found if row.problem is None] == [
            *rows[:7], {"text": "\u2028\u0085"}, *rows[7:]
        ]
        assert [(line, row.problem.reason[:22]) for line, row in found if row.problem] == [
            (10, "not JSON: Expecting pr"), (11, "the row is longer than")
        ]
        assert [line for line, _ in found] == [*range(1, 8), *range(10, len(lines) + 1)]


def test_blocks_of_a_plain_file_carry_no_rows(tmp_path: Path) -> None:
    from multiprocessing.reduction import ForkingPickler

    tiny.write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 1000}] * 10_000)
    cut = list(blocks(one(tmp_path / "rows.jsonl")))
    assert len(cut) == 3
    assert all(len(ForkingPickler.dumps(block)) < 1500 for block in cut)
    assert sum(1 for block in cut for _ in records_of(block)) == 10_000
    assert [block.stop - block.start < (4 << 20) + 2000 for block in cut] == [True] * 3


def test_a_line_of_many_blocks_is_passed_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    resize(monkeypatch, 1 << 16, 1 << 18)
    text = json.dumps({"text": "ok"}).encode()
    for suffix in ("jsonl", "json", "jsonl.gz"):
        long = b'{"text": "' + b"x" * (12 << 20) + b'"}'
        body = (
            b"[" + text + b",\n" + long + b",\n" + text + b"]" if suffix == "json" else b"\n".join([text, long, text])
        )
        file = write(tmp_path / f"rows.{suffix}", body)
        del body, long
        tracemalloc.start()
        found = [(line, row.value, row.problem and row.problem.reason) for line, row in all_rows(file)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [line for line, *_ in found] == [1, 2, 3]
        assert [value for _, value, _ in found] == [{"text": "ok"}, None, {"text": "ok"}]
        assert "longer than" in str(found[1][2])
        assert peak < 6 << 20, suffix


@COMPRESSED
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array(tmp_path: Path, suffix: str, indent: int | None, small: None) -> None:
    rows: list[Any] = [{"text": f'é "{i}" ]}}, \\', "n": [i, {"a": "[{"}]} for i in range(40)]
    file = write(tmp_path / f"rows.json{suffix}", json.dumps(rows, indent=indent, ensure_ascii=False).encode())
    assert values(file) == rows
    assert len(list(blocks(file))) > 5
    places = [(line, row.col) for line, row in all_rows(file)]
    text = json.dumps(rows, indent=indent, ensure_ascii=False)
    for (line, col), row in zip(places, rows, strict=True):
        here = text.split("\n")[line - 1][col - 1 :]
        assert here.startswith("{")
        assert indent or here.startswith(json.dumps(row, ensure_ascii=False))


def test_bad_elements_of_an_array_are_rows_of_their_own(tmp_path: Path, small: None) -> None:
    data = (
        b'\n[ {"a": 1},\n  {"b" 2}, 3, "x]", {"a": {\n"c": 1, "c": 2}},[{}],\n {"d": "'
        + b"y" * 300
        + b'"}, {"z":0} ]\n'
    )
    (tmp_path / "rows.json").write_bytes(data)
    found = list(all_rows(one(tmp_path / "rows.json")))
    said = [[line, row.col, row.value if row.problem is None else row.problem.reason] for line, row in found]
    assert said == tables.cases(__file__, "bad_elements_of_an_array")
    rows = {row.col: row for _, row in found if row.problem}
    assert position_of(rows[21], rows[21].problem) == (4, 9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("raw", "reason"), cases("broken_arrays", "raw", "reason", name="reason"))
def test_a_broken_array_is_an_error_at_its_place(tmp_path: Path, raw: str, reason: str, small: None) -> None:
    (tmp_path / "rows.json").write_text(raw, encoding="latin-1", newline="")
    with pytest.raises(DataError) as caught:
        values(one(tmp_path / "rows.json"))
    assert caught.value.message == f"{tmp_path}/rows.json:{reason}"


@pytest.mark.parametrize(("raw", "expected"), cases("json_layouts", "raw", "values", name="raw"))
def test_the_layouts_of_a_json_file(tmp_path: Path, raw: str, expected: list[Any]) -> None:
    (tmp_path / "rows.json").write_text(raw, encoding="latin-1", newline="")
    assert values(one(tmp_path / "rows.json")) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\]}', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(JSON, max_size=8), st.sampled_from([None, 2]), st.booleans(), st.integers(1, 40))
def test_elements_are_found_whatever_is_in_them(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int | None, ascii_only: bool, step: int
) -> None:
    import io

    data = json.dumps(items, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_blocks, "_READ_BYTES", step)
        found = list(json_blocks.Elements(io.BytesIO(data), "x", True, 1 << 20))
        assert [json.loads(element.raw) for element in found] == items
        assert all(data[e.offset : e.offset + len(e.raw)] == e.raw for e in found)
        short = list(json_blocks.Elements(io.BytesIO(data), "x", True, 5))
    assert [e.too_long for e in short] == [len(e.raw) > 5 and e.raw[:1] in (b"{", b"[", b'"') for e in found]
    assert [(e.offset, e.line, e.col) for e in short] == [(e.offset, e.line, e.col) for e in found]


@COMPRESSED
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_csv(tmp_path: Path, suffix: str, kind: str, small: None) -> None:
    import csv
    import io

    rows = [[f"q{i}, \t", f'say "a"\r\nline {i}\n' if i % 3 else ""] for i in range(30)]
    text = io.StringIO()
    csv.writer(text, delimiter="," if kind == "csv" else "\t").writerows([["prompt", "completion"], *rows])
    file = write(tmp_path / f"rows.{kind}{suffix}", b"\xef\xbb\xbf" + text.getvalue().encode())
    assert len(list(blocks(file))) > 5
    assert values(file) == [{"prompt": one, "completion": two} for one, two in rows]
    lines = [line for line, _ in all_rows(file)]
    starts = [i + 1 for i, line in enumerate(text.getvalue().split("\n")) if line.startswith(("q", '"q'))]
    assert lines == starts


@pytest.mark.parametrize("first", ["\n", "\ufeff\r\n\n", ""])
def test_blank_lines_before_the_columns_of_a_csv_file(tmp_path: Path, first: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes((first + "a,b\n1,2\n\n3\n").encode())
    found = list(records_of(*blocks(one(path))))
    before = first.count("\n")
    assert [(row.line, row.value) for row in found] == [(before + 2, {"a": "1", "b": "2"}), (before + 4, None)]
    path.write_bytes((first + "a,a\n1,2\n").encode())
    with pytest.raises(DataError, match=f"rows.csv:{before + 1}:1: the first line names the columns"):
        list(blocks(one(path)))


def test_bad_records_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,2\n\n1\n1,2,3\n"x\ny",\xff\n1,\x00\n3,4\n')
    assert [(line, row.value if row.problem is None else row.problem.reason) for line, row in all_rows(one(path))] == [
        (2, {"a": "1", "b": "2"}), (4, "1 fields for 2 columns"), (5, "3 fields for 2 columns"),
        (6, "not UTF-8: byte 0xff"), (8, "NUL character"), (9, {"a": "3", "b": "4"}),
    ]
    path.write_bytes(b"")
    assert values(one(path)) == []


@pytest.mark.parametrize(("data", "reason"), tables.cases(__file__, "csv_that_is_wrong"))
def test_csv_that_is_wrong_is_named(tmp_path: Path, data: str, reason: str) -> None:
    (tmp_path / "rows.csv").write_text(data)
    with pytest.raises(DataError, match=re.escape(f"rows.csv:{reason}")):
        values(one(tmp_path / "rows.csv"))


def test_a_quote_that_is_not_closed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "FIELD_CHARS", 1000)
    (tmp_path / "rows.csv").write_text('a,b\n"1,2\n' + "3,4\n" * 1000)
    with pytest.raises(DataError, match="field larger than field limit"):
        values(one(tmp_path / "rows.csv"))


@COMPRESSED
def test_text_is_documents_in_bounded_pieces(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values(write(tmp_path / f"a.md{suffix}", b"\xef\xbb\xbfone\ntwo\n")) == [{"text": "one\ntwo\n"}]
    assert values(write(tmp_path / f"b.txt{suffix}", b"\n  \n")) == []
    resize(monkeypatch, 16, 200)
    text = "line one\nline two\n\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\U0001f642\n"
    found = list(all_rows(write(tmp_path / f"c.txt{suffix}", text.encode())))
    assert "".join(row.value["text"] for _, row in found if row.value) == text
    assert [line for line, _ in found][:3] == [1, 2, 3]
    ((line, row),) = all_rows(write(tmp_path / f"d.txt{suffix}", b"ok\nab\xff"))
    assert row.problem is not None
    assert (line, position_of(row, row.problem), row.problem.reason) == (2, (2, 3), "not UTF-8: byte 0xff")
    ((line, row),) = all_rows(write(tmp_path / f"e.txt{suffix}", b"ok\n\nab\0"))
    assert row.problem is not None
    assert (line, row.problem.col, row.problem.reason) == (3, 3, "NUL character")


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(16, 40))
def test_pieces_join_to_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    text = "x" + text.replace("\0", "") + "y"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        resize(patch, size, 200)
        rows = [row for _, row in all_rows(one(path))]
    joined = "".join(row.value["text"] for row in rows if row.value)
    assert all(row.problem is None for row in rows)
    assert joined.replace("\ufeff", "").split() == text.replace("\ufeff", "").split()


ROWS = [{"messages": [{"role": "user", "content": f"é {i}"}], "score": i / 7, "tags": None} for i in range(50)]


def test_parquet(tmp_path: Path, small: None) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
    file = one(tmp_path / "rows.parquet")
    assert values(file) == ROWS
    assert [line for line, _ in all_rows(file)] == list(range(1, 51))
    assert len(list(blocks(file))) > 5
    row = next(records_of(next(blocks(file))))
    assert json.loads(row.raw) == row.value


def test_arrow_files_and_streams(tmp_path: Path, small: None) -> None:
    table = pa.Table.from_pylist(ROWS)
    write_stream(tmp_path / "a.arrow", table, 9)
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    for name in ("a", "b"):
        assert values(one(tmp_path / f"{name}.arrow")) == ROWS
    assert one(tmp_path / "a.arrow").kind == "arrow"


def test_bad_values_of_a_table_are_bad_rows(tmp_path: Path) -> None:
    texts = pa.array([b"ok", b"\xff", b"a\0", b"end"], pa.binary()).cast(pa.large_binary()).view(pa.large_string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    assert values(one(tmp_path / "rows.parquet")) == [
        {"text": "ok"}, "not UTF-8", "NUL character", {"text": "end"}
    ]  # fmt: skip


def test_json_columns_are_parsed(tmp_path: Path) -> None:
    rows = [{"a": [{"x": 1}, None]}, {"a": None}, {"a": [{"y": ["z"]}]}]
    storage = [None if row["a"] is None else [item and json.dumps(item) for item in row["a"]] for row in rows]
    table = pa.table({"a": pa.array(storage, pa.list_(pa.string())).cast(pa.list_(pa.json_()))})
    assert values(one(write_stream(tmp_path / "a.arrow", table))) == rows


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.gz", "rows.txt.zst", "rows.json.gz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    data = json.dumps(ROWS).encode() if ".json." in name else b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    if name == "rows.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name == "rows.arrow":
        with pa.ipc.new_file(str(path), pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS))
    else:
        write(path, data * 2000 if ".json." not in name else data)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle], "flip": whole[:4] + bytes(256) + whole[260:-9] + bytes(9),
        "other": b"PK\x03\x04 not this", "empty": b"",
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        values(one(path))
    assert caught.value.message.startswith(str(path))
    assert "\n" not in caught.value.message


def test_several_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a"') + gzip.compress(b": 2}\n"))
    assert values(one(path)) == [{"a": 1}, {"a": 2}]
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match="damaged or cut off gzip file"):
        values(one(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_decompression_bomb_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_module, "RATIO_FROM", 8 << 20)
    monkeypatch.setattr(block_module, "MAX_RATIO", 100)
    file = write(tmp_path / f"rows.jsonl{suffix}", b" " * (64 << 20))
    with pytest.raises(DataError, match=r"rows\.jsonl\.\w+: .* inflate to more than .*: a decompression bomb"):
        values(file)


@pytest.mark.parametrize("name", ["a.parquet", "nested.parquet", "a.arrow", "nested.arrow"])
def test_one_value_that_many_rows_mean_takes_little(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "BLOCK_BYTES", 1 << 18)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 300 + [1], pa.int32()), pa.array(["a" * (1 << 16), "b"]))
    column: pa.Array = texts
    if name.startswith("nested"):
        each = pa.StructArray.from_arrays([texts], ["text"])
        column = pa.ListArray.from_arrays(pa.array(range(302), pa.int32()), each)
    table = pa.table({"text": column})
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name, store_schema=False)
        batches = [batch.nbytes for batch in table_module.parquet_batches(tmp_path / name, 4 << 20)]
        assert max(batches) < 2 << 20
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    file = SourceFile(tmp_path / name, "parquet" if "parquet" in name else "arrow", name=name, parts=(tmp_path / name,))
    cut = list(blocks(file))
    assert len(cut) > 40
    assert sum(lines_in(block) for block in cut) == 301
    first, *_, last = values(file)
    assert json.dumps(first).count("a") >= 1 << 16
    assert "b" in json.dumps(last)


def listed(array: pa.Array, each: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(0, len(array) + 1, each), pa.int32()), array)


def repeated(text: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def views(text: str, rows: int) -> pa.Array:
    _, view, *texts = pa.array([text], pa.string_view()).buffers()
    return pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(view.to_pybytes() * rows), *texts])


LONG, NOTHING = "a" * 50_000, pa.array([0] * 1000, pa.int32())
ONES = pa.array([1] * 1000, pa.int32())
ONE_A_PAGE = {"write_batch_size": 1, "data_page_size": 1}
TABLES: dict[str, tuple[str, pa.Array, dict[str, Any]]] = {
    "a dictionary": ("a.parquet", repeated(LONG, 1000), {}),
    "a dictionary in lists": ("a.parquet", listed(repeated(LONG, 1000), 500), {}),
    "long texts": ("a.parquet", pa.array(["a" * 400_000] * 10), {"use_dictionary": False, **ONE_A_PAGE}),
    "rows of nulls": ("a.parquet", pa.nulls(100_000, pa.string()), {}),
    "indices": ("a.arrow", repeated(LONG, 1000), {}),
    "indices in lists": ("a.arrow", listed(repeated(LONG, 1000), 500), {}),
    "runs": ("a.arrow", pa.RunEndEncodedArray.from_arrays(pa.array([1000], pa.int32()), pa.array([LONG])), {}),
    "views": ("a.arrow", views(LONG, 1000), {}),
    "list views": ("a.arrow", pa.ListViewArray.from_arrays(NOTHING, ONES, pa.array([LONG])), {}),
    "lists of nothing": ("a.arrow", pa.FixedSizeListArray.from_arrays(pa.nulls(10**6), 1000), {}),
}  # fmt: skip


def write_table(path: Path, table: pa.Table, chunk: int = 9999, **how: Any) -> SourceFile:
    """Write a table as its suffix says, compressed."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, store_schema=False, compression="zstd", **how)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=chunk)
    return SourceFile(path, "parquet" if path.suffix == ".parquet" else "arrow", name=path.name, parts=(path,))


@pytest.fixture
def wary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of 1 MiB, and blocks of 64 KiB."""
    monkeypatch.setattr(table_module, "RATIO_FROM", 1 << 20)
    monkeypatch.setattr(table_module, "BLOCK_BYTES", 1 << 16)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_that_unpacks_without_end_is_refused(tmp_path: Path, kind: str, wary: None) -> None:
    name, column, how = TABLES[kind]
    file = write_table(tmp_path / name, pa.table({"text": column}), **how)
    begin = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=rf"{name}: .*rows unpack to more than") as caught:
        for block in blocks(file):
            assert pa.total_allocated_bytes() - begin < 4 << 20
            assert len(block.data or b"") < 1 << 20
    assert caught.value.hint


SYSTEM = "You answer in few words. " * 40
REAL: dict[str, Callable[[int], dict[str, Any]]] = {
    "labels": lambda i: {"text": f"{i * i * i:x}", "label": "good" if i % 3 else "bad"},
    "a system prompt": lambda i: {"system": SYSTEM, "prompt": f"{i * i:x}", "completion": f"{i * i * i:x}"},
    "messages": lambda i: {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{i}"}]},
    "tools": lambda i: {"tools": [SYSTEM] * 2, "prompt": f"{i * i * i:x}"},
}


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("name", ["a.parquet", "plain.parquet", "a.arrow"])
def test_a_table_whose_rows_are_much_alike_is_read(tmp_path: Path, kind: str, name: str, wary: None) -> None:
    rows = [REAL[kind](i) for i in range(2000)]
    how = {"use_dictionary": False, "data_page_size": 1 << 16} if name == "plain.parquet" else {}
    table = pa.Table.from_pylist(rows)
    file = write_table(tmp_path / name, table, 200, **how)
    assert kind == "labels" or table.nbytes > 50 * file.size()
    assert values(file) == rows


def test_a_row_of_a_table_that_is_too_long_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resize(monkeypatch, 1 << 16, 1 << 17)
    texts = ["b", "a" * (1 << 18), "c", "d" * 1000]
    for name in ("a.parquet", "a.arrow"):
        assert values(write_table(tmp_path / name, pa.table({"text": texts}))) == [
            {"text": "b"}, "the row is longer than 0 MiB", {"text": "c"}, {"text": "d" * 1000}
        ]  # fmt: skip
    ids = list(range(1 << 15))  # longer than a text may be, and of fewer tokens
    assert values(write_table(tmp_path / "a.parquet", pa.table({"input_ids": [ids]}))) == [{"input_ids": ids}]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_bytes_of_a_table_that_are_wrong_are_named(tmp_path: Path, name: str) -> None:
    """Headers that lie end in an error with the file's name, whichever byte is wrong."""
    table = pa.table({"text": listed(repeated("long" * 50, 40), 4), "n": list(range(10))})
    file = write_table(tmp_path / name, table)
    whole = bytearray(file.path.read_bytes())
    for at in range(0, len(whole), 7):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(DataError):
            values(file)


def test_blank_lines_without_end_and_brackets_take_little(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl.gz", b"\n" * (8 << 20) + b'{"a": 1}\n')
    assert values(file) == [{"a": 1}]
    assert [line for line, _ in all_rows(file)] == [(8 << 20) + 1]
    assert max(len(block.data or b"") for block in blocks(file)) <= 4 << 20
    for name in ("deep.json", "deep.json.gz"):
        deep = write(tmp_path / name, b"[" * (1 << 17))
        with pytest.raises(DataError, match=r"deep\.json.*: not JSON: nested too deeply"):
            values(deep)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_file_that_vanishes_is_named(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, b'{"a": 1}\n')
    file.path.unlink()
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        list(blocks(file))
    plain = Block(file, 0, 0, 9)
    if name in {"a.jsonl", "a.txt"}:
        with pytest.raises(DataError, match="No such file"):
            list(records_of(plain))
        with pytest.raises(DataError, match="No such file"):
            lines_in(Block(file, 0, 0, 9))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 60))
@example([b"\x00", b"\x0b"], 1)
@example([b"\r ", b"\r", b"{}"], 3)
def test_lines_do_not_depend_on_how_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: Sequence[bytes], size: int
) -> None:
    directory = tmp_path_factory.mktemp("lines")
    data = b"\n".join(lines)
    seen = []
    for name, block in (("a.jsonl", size), ("a.jsonl", 4 << 20), ("a.jsonl.gz", size)):
        file = write(directory / name, data)
        with pytest.MonkeyPatch.context() as patch:
            resize(patch, block, 100)
            seen.append(
                [
                    (line, row.raw, row.value, row.problem and (row.problem.reason, row.problem.col))
                    for line, row in all_rows(file)
                ]
            )
    assert seen[0] == seen[1] == seen[2]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(DataError, match="two columns of one name: text, text"):
        values(one(path))


def test_a_value_of_a_table_that_python_has_not_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    days = pa.array([1, 2_000_000_000, 2], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "day": days}), path)
    first, second, third = values(one(path))
    assert (first["text"], third["text"]) == ("a", "c") and "not readable" in second


KINDS = ("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.tsv.zst", "rows.parquet", "rows.feather")
SLICES = ("[:10%]", "[90%:]", "[-5%:]", "[100:200]", "[ 37 : ]", "[:-30]", "[-3:]", "[:]", "[5:6]", "[0:1_000]")


@pytest.mark.parametrize("name", KINDS)
def test_a_slice_of_a_file(tmp_path: Path, name: str, small: None) -> None:
    path = tmp_path / name
    write_kind(path, [{"prompt": f"{i}", "completion": "x" * (i % 30)} for i in range(300)], broken=7)
    whole = list(all_rows(one(path)))
    assert len(whole) == 300
    for part in SLICES:
        first, _, last = part.strip("[ ]").replace("_", "").partition(":")
        bounds = [int(text.strip(" %")) * (3 if "%" in text else 1) if text.strip() else None for text in (first, last)]
        found = list(all_rows(one(Path(f"{path}{part}"))))
        assert str(found) == str(whole[slice(*bounds)]), part  # with the lines that they have in the file
    assert one(Path(f"{path}[:3]")).identity() != one(Path(f"{path}[:4]")).identity()


def test_a_slice_of_ids_and_what_has_none(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(50, dtype="<u2"))
    file = one(tmp_path / "ids.npy[10%:20]")
    assert file.array is not None and file.array.mapped(file.path).tolist() == list(range(5, 20))
    (tmp_path / "a.txt").write_text("a b c")
    write_kind(tmp_path / "rows.jsonl", [{"prompt": "a"}] * 12)
    for name, reason in tables.cases(__file__, "what_has_no_such_slice"):
        with pytest.raises(DataError, match=reason):
            list(all_rows(one(tmp_path / name)))
    (tmp_path / "rows.jsonl[:3]").write_text("what has the name comes first")
    assert len(list(all_rows(one(tmp_path / "rows.jsonl[:3]", format="text")))) == 1
