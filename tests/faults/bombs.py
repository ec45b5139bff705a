"""Files that are small or well-formed and ask for all memory: compressed rows, tables, and headers of weights."""

import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests.faults.artifacts import EXPORT, GENERATE, TRAIN, Artifact, Place, byte_tokenizer, overwrite, rehashed

MIB = 1 << 20
MEMBERS = 64
"""Of a compressed file, each of 64 MiB: more than any memory bound here, and quickly written."""
SHARD = "rank-0000-of-0001.safetensors"


def _compressed(data: bytes, kind: str) -> bytes:
    import pyarrow as pa

    return gzip.compress(data) if kind == "gz" else bytes(pa.compress(data, codec="zstd", asbytes=True))


def _rows_bomb(place: Place, name: str, first: bytes, unit: bytes, members: int = MEMBERS, each: int = 64) -> None:
    """Rows that begin with `first` and go on with `unit` for `members` times `each` MiB, in a file of many members."""
    kind = name.rpartition(".")[2]
    part = _compressed(unit * (each * MIB // len(unit)), kind)
    (place.inputs / name).write_bytes(_compressed(first, kind) + part * members)
    _reads(place, name)


def _reads(place: Place, name: str) -> None:
    """Have the recipe train on a file of the inputs."""
    place.replace(place.inputs / "rows.jsonl", place.inputs / name)


def _table(place: Place, name: str, made: Callable[[], Any], **how: Any) -> None:
    """A table of a column of completions, as small a file as its kind allows."""
    import pyarrow as pa

    column = made()
    prompt = pa.array(["a"]).take(pa.array([0] * len(column), pa.int32()))
    settings = {"dictionary_pagesize_limit": 64 * MIB, "store_schema": False, **how}
    _written(place, name, pa.table({"prompt": prompt, "completion": column}), **settings)


def _written(place: Place, name: str, table: Any, **how: Any) -> None:
    """A table as a file of its kind, on which the recipe trains; what else is said is of parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if name.endswith(".parquet"):
        pq.write_table(table, place.inputs / name, compression="zstd", **how)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(place.inputs / name, table.schema, options=options) as writer:
            writer.write_table(table)
    _reads(place, name)


def _meant(text: str, rows: int, kind: str = "dictionary") -> Any:
    """A text that an array holds once, and means in every row."""
    import pyarrow as pa

    one, nothing = pa.array([text]), pa.array([0] * rows, pa.int32())
    if kind == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), one)
    if kind == "list views":
        return pa.ListViewArray.from_arrays(nothing, pa.array([1] * rows, pa.int32()), one)
    if kind == "views":
        _, view, *texts = one.cast(pa.string_view()).buffers()
        assert view is not None
        return pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(view.to_pybytes() * rows), *texts])
    return pa.DictionaryArray.from_arrays(nothing, one)


def _one_list(values: Any) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _texts(size: int, count: int) -> Any:
    """Equal texts, each written in full."""
    import pyarrow as pa

    return pa.array(["a" * size], pa.large_string()).take(pa.array([0] * count, pa.int32()))


def _nulls(count: int, of: str) -> Any:
    import pyarrow as pa

    return pa.nulls(count, of)


TABLES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "a dictionary": ("bomb.parquet", lambda: _meant("a" * 2 * MIB, 100_000), {}),
    "a dictionary in one list": ("bomb.parquet", lambda: _one_list(_meant("a" * 2 * MIB, 100_000)), {}),
    "long texts": ("bomb.parquet", lambda: _texts(64 * MIB, 16), {"use_dictionary": False}),
    "rows of nulls": ("bomb.parquet", lambda: _nulls(50_000_000, "string"), {}),
    "a dictionary ": ("bomb.arrow", lambda: _meant("a" * 4 * MIB, 100_000), {}),
    "a dictionary in one list ": ("bomb.arrow", lambda: _one_list(_meant("a" * 4 * MIB, 100_000)), {}),
    "runs": ("bomb.arrow", lambda: _meant("a" * 4 * MIB, 100_000, "runs"), {}),
    "views": ("bomb.arrow", lambda: _meant("a" * 4 * MIB, 100_000, "views"), {}),
    "list views": ("bomb.arrow", lambda: _meant("a" * 4 * MIB, 100_000, "list views"), {}),
}  # fmt: skip
"""The file, the column, and how it is written: each of a few kB, but for the nulls."""


HONEST = {
    "labels": lambda i: {"prompt": f"{i * i:x}", "completion": "good" if i % 3 else "bad"},
    "one prompt": lambda i: {"prompt": "be brief. " * 4, "completion": f"{i * i:x}"},
}
"""Rows that are meant, though most of what they say is the same."""


def _honest(place: Place, name: str, row: Callable[[int], dict[str, str]]) -> None:
    import pyarrow as pa

    _written(place, name, pa.Table.from_pylist([row(i) for i in range(20_000)]))


def _task_bomb(place: Place, first: bytes, unit: bytes) -> None:
    (place.inputs / "quiz.jsonl.gz").write_bytes(
        gzip.compress(first) + gzip.compress(unit * (64 * MIB // len(unit))) * MEMBERS
    )


EVAL_TASK = ("eval", "{run}", "--tasks", "{inputs}/quiz.jsonl.gz")
PREPARE = ("prepare-data", "{inputs}/r.yaml", "--data.too_long", "truncate")
_SHORT = b'{"prompt": "a", "completion": "b"}\n'
_LONG = b'{"prompt": "a", "completion": "'


def _short_rows(count: int) -> bytes:
    return b"".join(b'{"prompt": "%d", "completion": "%s"}\n' % (i, b"b" * 220) for i in range(count))


def _many_short_rows(place: Place, name: str) -> None:
    _rows_bomb(place, name, _short_rows(16 * MIB // 256), b"\n", 1, each=16)


def _long_row(place: Place) -> None:
    overwrite(place.inputs / "rows.jsonl", _short_rows(64) + _LONG + b"b" * (7 * MIB) + b'"}\n')


ROWS: dict[str, tuple[str, bytes, bytes]] = {
    "one line": ("bomb.jsonl", _LONG, b"b"), "empty lines": ("bomb.jsonl", b"", b"\n"),
    "one array of nothing": ("bomb.json", b"[", b" "), "brackets": ("bomb.json", b"", b"["),
    "one text of blanks": ("bomb.txt", b"", b" "), "one field": ("bomb.csv", b"prompt,completion\na,", b"b"),
}
"""What each begins with, and what follows for 4 GiB."""


def data_bombs() -> Iterator[Artifact]:
    """Rows, tables and items of tasks that inflate."""
    for words, (name, first, unit) in ROWS.items():
        for kind in ("gz", "zst"):
            file = f"{name}.{kind}"
            plant = partial(_rows_bomb, name=file, first=first, unit=unit)
            yield Artifact(f"{kind} bomb: {words}", plant, TRAIN, file)
    for name in ("bomb.jsonl.gz", "bomb.jsonl.zst"):
        kind = name.rpartition(".")[2]
        short = partial(_rows_bomb, name=name, first=b"", unit=_SHORT)
        yield Artifact(f"{kind} bomb: short rows", short, TRAIN, name)
        # As much as no ratio tells of.
        line = partial(_rows_bomb, name=name, first=_LONG, unit=b"b", members=3, each=16)
        yield Artifact(f"{kind} rows: one line of 48 MiB", line, TRAIN, "longer than 8 MiB")
        many = partial(_many_short_rows, name=name)
        yield Artifact(f"{kind} rows: 16 MiB of short lines", many, PREPARE, "", refused=False)
    yield Artifact("a line of 7 MiB", _long_row, PREPARE, "", refused=False)
    for words, (name, column, how) in TABLES.items():
        yield Artifact(f"{words.strip()} in {name}", partial(_table, name=name, made=column, **how), TRAIN, name)
    for words, row in HONEST.items():
        for name in ("honest.parquet", "honest.arrow"):
            yield Artifact(f"{words} in {name}", partial(_honest, name=name, row=row), PREPARE, "", refused=False)
    item = b'{"prompt": "a", "answer": "b"}\n'
    for words, first, unit in (("one line", b'{"prompt": "', b"a"), ("items without end", b"", item)):
        plant = partial(_task_bomb, first=first, unit=unit)
        yield Artifact(f"gz bomb as a task: {words}", plant, EVAL_TASK, "quiz.jsonl.gz")


def _raw(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _edited_header(edit: Callable[[dict[str, Any]], str]) -> Callable[[bytes], bytes]:
    """A file whose header is what `edit` makes of the one that it had; the tensors' bytes stay."""

    def edited(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        return _raw(edit(json.loads(data[8 : 8 + length])).encode()) + data[8 + length :]

    return edited


def _changed(**facts: Any) -> Callable[[bytes], bytes]:
    """The first tensor's facts are these."""

    def edit(header: dict[str, Any]) -> str:
        name = next(name for name in header if name != "__metadata__")
        return json.dumps({**header, name: {**header[name], **facts}})

    return _edited_header(edit)


def _twice(header: dict[str, Any]) -> str:
    name = next(name for name in header if name != "__metadata__")
    return f"{{{json.dumps(name)}: {json.dumps({**header[name], 'shape': [1 << 40]})}, {json.dumps(header)[1:]}"


def _all_at_once(header: dict[str, Any]) -> str:
    """Every tensor over the same bytes."""
    longest = max((facts["data_offsets"] for facts in header.values() if "data_offsets" in facts), key=lambda at: at[1])
    return json.dumps({n: {**f, "data_offsets": longest} if "data_offsets" in f else f for n, f in header.items()})


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2^60 bytes": lambda data: _raw(data[8:], 1 << 60),
    "a header of 300 MB": lambda _: _raw(b'{"__metadata__":{"a":"' + b"x" * 300_000_000 + b'"}}'),
    "a header of a million tensors": lambda _: _raw(
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(10**6)) + b"}"
    ),
    "a deep header": lambda _: _raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a header that is a list": lambda _: _raw(b"[]"),
    "offsets that overlap": _edited_header(_all_at_once),
    "offsets beyond the file": _changed(data_offsets=[0, 1 << 50]),
    "offsets below zero": _changed(data_offsets=[-8, 1 << 20]),
    "a huge shape": _changed(shape=[1 << 40, 1 << 20]),
    "a huge shape without numbers": _changed(shape=[1 << 62, 0], data_offsets=[0, 0]),
    "a tensor of no type": _changed(dtype="posix.system"),
    "a name twice": _edited_header(_twice),
    "a pickle": lambda _: b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
}


def teaching(place: Place, more: str = "") -> Path:
    """Have the recipe learn from a teacher, a copy of the base model with a tokenizer."""
    teacher = place.inputs / "teacher"
    shutil.copytree(place.model, teacher)
    byte_tokenizer(teacher)
    with (place.inputs / "r.yaml").open("a") as recipe:
        recipe.write(f"method: {{kind: distill, teacher: {teacher}, rows: sft{more}}}\n")
    return teacher


def _given(place: Place) -> Path:
    """Have the model begin with weights from another one."""
    source = place.inputs / "source"
    shutil.copytree(place.model, source)
    place.replace("model: {", f"model: {{init_from: [{source}], ")
    return source


def _of_model(place: Place) -> Path:
    byte_tokenizer(place.model)
    return place.model


def _weights(place: Place, of: Callable[[Place], Path], make: Callable[[bytes], bytes]) -> None:
    """The weights in a directory, of which ``make`` makes others."""
    path = of(place) / "model.safetensors"
    overwrite(path, make(path.read_bytes()))


def _in_checkpoint(place: Place, name: str, make: Callable[[bytes], bytes]) -> None:
    overwrite(place.newest / name, make((place.newest / name).read_bytes()))
    rehashed(place.newest, name)


def header_bombs() -> Iterator[Artifact]:
    """Each header in each place where weights come from."""
    weights, probe, base = "model.safetensors", "probe.safetensors", attrgetter("model")
    for words, make in HEADERS.items():
        yield Artifact(f"{words}, base model", partial(_weights, of=base, make=make), TRAIN, weights)
        yield Artifact(f"{words}, init_from", partial(_weights, of=_given, make=make), TRAIN, "source")
        yield Artifact(f"{words}, shard", partial(_in_checkpoint, name=SHARD, make=make), EXPORT, "", refused=None)
    for words in ("a header of 2^60 bytes", "a deep header", "a huge shape", "a pickle"):
        make = HEADERS[words]
        yield Artifact(f"{words}, probe", partial(_in_checkpoint, name=probe, make=make), EXPORT, probe)
        yield Artifact(f"{words}, teacher", partial(_weights, of=teaching, make=make), TRAIN, weights)
        yield Artifact(f"{words}, generate", partial(_weights, of=_of_model, make=make), GENERATE, weights)
