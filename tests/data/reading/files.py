"""Source files as tests write them, and the rows that are read from them."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

from tuner.config.recipe import DataSource
from tuner.data.reading.blocks import blocks, records_of
from tuner.data.sources import SourceFile, expand


def one(path: Path | str, **more: Any) -> SourceFile:
    (file,) = expand([DataSource(path=str(path), **more)])
    return file


def values(file: SourceFile) -> list[Any]:
    """The value of each row, or why it has none."""
    rows = [row for block in blocks(file) for row in records_of(block)]
    return [row.value if row.problem is None else row.problem.reason for row in rows]


def write(path: Path, data: bytes) -> SourceFile:
    """Write a file as its suffix says."""
    if path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as sink:
            sink.write(data)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return one(path)


def write_kind(path: Path, rows: Sequence[dict[str, Any]], broken: int | None = None) -> None:
    """Write rows as a file's name says; JSON lines with blank ones and one that is none from line ``broken`` on."""
    table = pa.Table.from_pylist(rows)
    if path.suffix in {".parquet", ".feather"}:
        pq.write_table(table, path) if path.suffix == ".parquet" else feather.write_feather(table, str(path))
        return
    mark = {".csv": ",", ".tsv": "\t"}.get(Path(path.name.removesuffix(".zst")).suffix)
    lines = [json.dumps(row) for row in rows]
    if broken is not None and ".jsonl" in path.name:
        lines[broken : broken + 2] = ["", "{", "", lines[broken + 1]]
    text = "[" + ",\n".join(lines) + "]" if path.suffix == ".json" else "\n".join(lines)
    if mark is not None:
        text = "\n".join([mark.join(rows[0]), *(mark.join(row.values()) for row in rows)])
    write(path, text.encode())


def write_stream(path: Path, table: pa.Table, chunk: int | None = None) -> Path:
    """Write a table as a stream of Arrow, in batches of so many rows."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path
