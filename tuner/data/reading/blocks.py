"""Source files cut into blocks of about 4 MiB, and the raw rows of a block.

How a file is cut follows from its bytes alone. A block of an uncompressed text file is a range of bytes that whoever
reads it opens for itself; what has to be inflated or decoded in order is done by the caller, block by block, and goes
along with the block.
"""

from collections.abc import Callable, Iterator

from tuner.data.reading.block import Block, RawRow, parts
from tuner.data.reading.csv_blocks import csv_blocks, csv_rows
from tuner.data.reading.json_blocks import json_blocks, json_rows
from tuner.data.reading.jsonl import locate
from tuner.data.reading.problems import RowProblem
from tuner.data.reading.sources import Kind, SourceFile, file_error
from tuner.data.reading.tables import table_blocks, table_rows
from tuner.data.reading.text_blocks import text_blocks, text_rows

__all__ = ["Block", "RawRow", "blocks", "lines_in", "place", "rows_of"]
Cut = Callable[[SourceFile], Iterator[Block]]
Read = Callable[[Block], Iterator[RawRow]]
_WAYS: dict[Kind, tuple[Cut, Read]] = {
    "jsonl": (json_blocks, json_rows),
    "json": (json_blocks, json_rows),
    "csv": (csv_blocks, csv_rows),
    "tsv": (csv_blocks, csv_rows),
    "text": (text_blocks, text_rows),
    "parquet": (table_blocks, table_rows),
    "arrow": (table_blocks, table_rows),
}


def blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a file, reading it in bounded memory. DataError where it cannot be read on."""
    try:
        yield from _WAYS[file.kind][0](file)
    except OSError as error:
        raise file_error(file, error) from error


def rows_of(block: Block) -> Iterator[RawRow]:
    """Yield the rows of a block; unreadable ones carry their problem. DataError where the file cannot be read."""
    try:
        yield from _WAYS[block.file.kind][1](block)
    except OSError as error:
        raise file_error(block.file, error) from error


def lines_in(block: Block) -> int:
    """Lines of a block, blank ones counted; rows where a line is a row. DataError."""
    if block.lines is not None:
        return block.lines
    try:
        return sum(part.count(b"\n") for part in parts(block))
    except OSError as error:
        raise file_error(block.file, error) from error


def place(row: RawRow, problem: RowProblem) -> tuple[int, int]:
    """Return line (inside the block, from 1) and column (from 1) of a problem in a row."""
    if row.col == 0:
        return row.line, problem.col or 1
    text = row.raw.decode("utf-8", "replace")
    position = (problem.col or 1) - 1
    if problem.col is None and row.value is not None and problem.path:
        position = locate(text, problem.path)
    before = text[:position]
    lines = before.count("\n")
    return row.line + lines, len(before) - before.rfind("\n") if lines else row.col + position
