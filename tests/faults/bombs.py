"""Files that are small or well-formed and ask for all memory: compressed rows, tables, and headers of weights."""

from __future__ import annotations

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


def _rows_bomb(place: Place, name: str, first: bytes, unit: bytes, members: int = MEMBERS) -> None:
    """Rows that begin with `first` and go on with `unit` for `members` times 64 MiB, in a file of many members."""
    kind = name.rpartition(".")[2]
    part = _compressed(unit * (64 * MIB // len(unit)), kind)
    (place.inputs / name).write_bytes(_compressed(first, kind) + part * members)
    _reads(place, name)


def _reads(place: Place, name: str) -> None:
    """Have the recipe train on a file of the inputs."""
    recipe = (place.inputs / "r.yaml").read_text()
    (place.inputs / "r.yaml").write_text(recipe.replace(str(place.inputs / "rows.jsonl"), str(place.inputs / name)))


def _table_bomb(place: Place, name: str) -> None:
    """One text of 4 MiB in a dictionary, and 100,000 rows that mean it: 400 GB of a file of a few kB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["a" * (4 * MIB)]))
    table = pa.table({"text": column})
    if name.endswith(".parquet"):
        pq.write_table(table, place.inputs / name, dictionary_pagesize_limit=64 * MIB, compression="zstd")
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(place.inputs / name, table.schema, options=options) as writer:
            writer.write_table(table)
    _reads(place, name)


def _zeros_table(place: Place, name: str) -> None:
    """A record batch of 1 GiB of zeros, compressed to a few hundred kB."""
    import pyarrow as pa

    batch = pa.record_batch([pa.array(["\0" * (64 * MIB)] * 16, pa.large_string())], names=["text"])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(place.inputs / name, batch.schema, options=options) as writer:
        writer.write_batch(batch)
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


_LONG = b'{"prompt": "a", "completion": "'


def _short_rows(count: int = 16 * MIB // 256) -> bytes:
    return b"".join(b'{"prompt": "%d", "completion": "%s"}\n' % (i, b"b" * 220) for i in range(count))


ROWS: dict[str, tuple[str, bytes, bytes]] = {
    "one line": ("bomb.jsonl", _LONG, b"b"),
    "empty lines": ("bomb.jsonl", b"", b"\n"),
    "one array of nothing": ("bomb.json", b"[", b" "),
    "brackets": ("bomb.json", b"", b"["),
    "one text of blanks": ("bomb.txt", b"", b" "),
    "one field": ("bomb.csv", b"prompt,completion\na,", b"b"),
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
    for kind in ("gz", "zst"):  # as much as no ratio tells of
        yield Artifact(
            f"{kind} rows: one line of 192 MiB",
            lambda p, k=kind: _rows_bomb(p, f"bomb.jsonl.{k}", _LONG, b"b", 3),
            _train,
            "longer than 8 MiB",
        )
        yield Artifact(
            f"{kind} rows: 16 MiB of short lines",
            lambda p, k=kind: _rows_bomb(p, f"bomb.jsonl.{k}", _short_rows(), b"\n", 1),
            _prepare,
            "",
            refused=False,
        )
    yield Artifact(
        "a line of 7 MiB",
        lambda p: overwrite(p.inputs / "rows.jsonl", _short_rows(64) + _LONG + b"b" * (7 * MIB) + b'"}\n'),
        _prepare,
        "",
        refused=False,
    )
    for name in ("bomb.parquet", "bomb.arrow"):
        yield Artifact(f"a dictionary in {name}", lambda p, n=name: _table_bomb(p, n), _train, name)
    yield Artifact("compressed zeros in bomb.arrow", lambda p: _zeros_table(p, "bomb.arrow"), _train, "bomb.arrow")
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
