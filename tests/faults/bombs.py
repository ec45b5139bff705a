"""Files that are small or well-formed and ask for all memory: compressed rows, tables, and headers of weights."""

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.artifacts import Artifact, Place, byte_tokenizer, overwrite, rehashed

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
    recipe = (place.inputs / "r.yaml").read_text()
    (place.inputs / "r.yaml").write_text(recipe.replace(str(place.inputs / "rows.jsonl"), str(place.inputs / name)))


def _table(place: Place, name: str, column: Any, **how: Any) -> None:
    """A table of a column of completions, as small a file as its kind allows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompt = pa.array(["a"]).take(pa.array([0] * len(column), pa.int32()))
    table = pa.table({"prompt": prompt, "completion": column})
    if name.endswith(".parquet"):
        settings = {"dictionary_pagesize_limit": 64 * MIB, "compression": "zstd", **how}
        pq.write_table(table, place.inputs / name, store_schema=False, **settings)
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
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([row(i) for i in range(20_000)])
    if name.endswith(".parquet"):
        pq.write_table(table, place.inputs / name, compression="zstd")
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(place.inputs / name, table.schema, options=options) as writer:
            writer.write_table(table)
    _reads(place, name)


def _task_bomb(place: Place, first: bytes, unit: bytes) -> None:
    (place.inputs / "quiz.jsonl.gz").write_bytes(
        gzip.compress(first) + gzip.compress(unit * (64 * MIB // len(unit))) * MEMBERS
    )


def _eval_task(place: Place) -> tuple[str, ...]:
    return ("eval", str(place.run), "--tasks", str(place.inputs / "quiz.jsonl.gz"))


def _train(place: Place) -> tuple[str, ...]:
    return place.train


def _prepare(place: Place) -> tuple[str, ...]:
    return ("prepare-data", str(place.inputs / "r.yaml"), "--data.too_long", "truncate")


_SHORT = b'{"prompt": "a", "completion": "b"}\n'
_LONG = b'{"prompt": "a", "completion": "'


def _short_rows(count: int = 16 * MIB // 256) -> bytes:
    return b"".join(b'{"prompt": "%d", "completion": "%s"}\n' % (i, b"b" * 220) for i in range(count))


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
            yield Artifact(
                f"{kind} bomb: {words}",
                lambda p, f=file, a=first, u=unit: _rows_bomb(p, f, a, u),
                _train,
                file,
            )
    for kind in ("gz", "zst"):
        name = f"bomb.jsonl.{kind}"
        yield Artifact(f"{kind} bomb: short rows", lambda p, n=name: _rows_bomb(p, n, b"", _SHORT), _train, name)
    for kind in ("gz", "zst"):  # as much as no ratio tells of
        yield Artifact(
            f"{kind} rows: one line of 48 MiB",
            lambda p, k=kind: _rows_bomb(p, f"bomb.jsonl.{k}", _LONG, b"b", 3, each=16),
            _train,
            "longer than 8 MiB",
        )
        yield Artifact(
            f"{kind} rows: 16 MiB of short lines",
            lambda p, k=kind: _rows_bomb(p, f"bomb.jsonl.{k}", _short_rows(), b"\n", 1, each=16), _prepare, "",
            refused=False,
        )
    yield Artifact(
        "a line of 7 MiB",
        lambda p: overwrite(p.inputs / "rows.jsonl", _short_rows(64) + _LONG + b"b" * (7 * MIB) + b'"}\n'), _prepare,
        "", refused=False,
    )
    for words, (name, column, how) in TABLES.items():
        plant = lambda p, n=name, c=column, h=how: _table(p, n, c(), **h)  # noqa: E731 - one of each
        yield Artifact(f"{words.strip()} in {name}", plant, _train, name)
    for words, row in HONEST.items():
        for name in ("honest.parquet", "honest.arrow"):
            plant = lambda p, n=name, r=row: _honest(p, n, r)  # noqa: E731 - one of each
            yield Artifact(f"{words} in {name}", plant, _prepare, "", refused=False)
    item = b'{"prompt": "a", "answer": "b"}\n'
    for words, first, unit in (("one line", b'{"prompt": "', b"a"), ("items without end", b"", item)):
        plant = lambda p, a=first, u=unit: _task_bomb(p, a, u)  # noqa: E731 - one of each
        yield Artifact(f"gz bomb as a task: {words}", plant, _eval_task, "quiz.jsonl.gz")


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
    import shutil

    teacher = place.inputs / "teacher"
    shutil.copytree(place.model, teacher)
    byte_tokenizer(teacher)
    with (place.inputs / "r.yaml").open("a") as recipe:
        recipe.write(f"method: {{kind: distill, teacher: {teacher}, rows: sft{more}}}\n")
    return teacher


def _given(place: Place) -> Path:
    """Have the model begin with weights from another one."""
    import shutil

    source = place.inputs / "source"
    shutil.copytree(place.model, source)
    recipe = (place.inputs / "r.yaml").read_text()
    (place.inputs / "r.yaml").write_text(recipe.replace("model: {", f"model: {{init_from: [{source}], "))
    return source


def _replace(path: Path, make: Callable[[bytes], bytes]) -> None:
    overwrite(path, make(path.read_bytes()))


def _in_checkpoint(place: Place, name: str, make: Callable[[bytes], bytes]) -> None:
    _replace(place.newest / name, make)
    rehashed(place.newest, name)


def header_bombs() -> Iterator[Artifact]:
    """Each header in each place where weights come from."""
    weights = "model.safetensors"
    export = ("export-hf", "runs/a/checkpoints/step-4", "--output", "out")
    for words, make in HEADERS.items():
        yield Artifact(f"{words}, base model", lambda p, m=make: _replace(p.model / weights, m), _train, weights)
        yield Artifact(f"{words}, init_from", lambda p, m=make: _replace(_given(p) / weights, m), _train, "source")
        yield Artifact(
            f"{words}, shard", lambda p, m=make: _in_checkpoint(p, SHARD, m), lambda _: export, "", refused=None
        )
    for words in ("a header of 2^60 bytes", "a deep header", "a huge shape", "a pickle"):
        make = HEADERS[words]
        yield Artifact(
            f"{words}, probe",
            lambda p, m=make: _in_checkpoint(p, "probe.safetensors", m),
            lambda _: export,
            "probe.safetensors",
        )
        yield Artifact(f"{words}, teacher", lambda p, m=make: _replace(teaching(p) / weights, m), _train, weights)
        yield Artifact(
            f"{words}, generate",
            lambda p, m=make: (byte_tokenizer(p.model), _replace(p.model / weights, m)),
            lambda p: ("generate", str(p.model), "--prompt", "a"),
            weights,
        )
