"""Source files as tests write them, and the rows that are read from them."""

from pathlib import Path
from typing import Any

import pyarrow as pa

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


def write_stream(path: Path, table: pa.Table, chunk: int | None = None) -> Path:
    """Write a table as a stream of Arrow, in batches of so many rows."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path
