"""Source files cut into blocks of about 4 MiB, and the raw records of a block.

How a file is cut follows from its bytes alone. A block of an uncompressed text file is a range of bytes that whoever
reads it opens for itself; what has to be inflated or decoded in order is done by the caller, block by block, and goes
along with the block.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from tuner.config.methods import ExampleKind
from tuner.data.reading.block import Block, RawRecord, parts
from tuner.data.reading.data_sets import UNCOUNTED, records_in
from tuner.data.reading.examples import Learned, PlainText, Tokens
from tuner.data.reading.id_blocks import id_blocks, id_records
from tuner.data.reading.json_blocks import json_blocks, json_records
from tuner.data.reading.jsonl import locate
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import read_as
from tuner.data.reading.tables import table_blocks, table_records
from tuner.data.reading.text_blocks import csv_blocks, csv_records, text_blocks, text_records
from tuner.data.sources import Kind, SourceFile, source_errors

__all__ = ["Block", "RawRecord", "blocks", "lines_in", "position_of", "records_of"]
Cut = Callable[[SourceFile], Iterator[Block]]
Records = Callable[[Block], Iterator[RawRecord]]
Read = Learned | RecordProblem
"""What a record is an example of, or why it is none."""
_WAYS: dict[Kind, tuple[Cut, Records]] = {
    "jsonl": (json_blocks, json_records), "json": (json_blocks, json_records), "csv": (csv_blocks, csv_records),
    "tsv": (csv_blocks, csv_records), "text": (text_blocks, text_records), "parquet": (table_blocks, table_records),
    "arrow": (table_blocks, table_records), "ids": (id_blocks, id_records),
}


def blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a file, reading it in bounded memory. DataError where it cannot be read on."""
    with source_errors(file):
        yield from _sliced(file) if file.part else _WAYS[file.kind][0](file)


def records_of(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block; unreadable ones carry their problem. DataError where the file cannot be read."""
    with source_errors(block.file):
        yield from islice(_WAYS[block.file.kind][1](block), *(block.taken or (0, None)))


def _sliced(file: SourceFile) -> Iterator[Block]:
    """The blocks of a slice, and those before it, of which no record is read: lines are counted from the first."""
    cut, records = _WAYS[file.kind]
    is_counted = re.search("[%-]", file.part) is not None
    total = sum(_records_in(block, records) for block in cut(file)) if is_counted else UNCOUNTED
    start, stop = records_in(file.part, total, file.name) or (0, total)
    for block in cut(file):
        count = _records_in(block, records)
        yield replace(block, taken=(min(max(start, 0), count), min(stop, count)))
        start, stop = start - count, stop - count
        if stop <= 0:
            return


def _records_in(block: Block, records: Records) -> int:
    is_table = block.file.kind in {"parquet", "arrow"} and block.lines is not None
    return block.lines - block.start if is_table and block.lines is not None else sum(1 for _ in records(block))


def examples_of(block: Block, kind: ExampleKind = "sft") -> Iterator[tuple[RawRecord, Read]]:
    """Yield the records of a block, each with its example or with why it has none. DataError as for `records_of`.

    `kind` says what the method's examples are.
    """
    form, columns = block.file.format, dict(block.file.columns)
    for record in records_of(block):
        if record.value is None:
            yield record, record.problem or RecordProblem("the row cannot be read", 1)
            continue
        if block.file.array is not None:
            no_answers = RecordProblem("token ids alone have no answers to compare", 1)
            ids = Tokens(record.value["input_ids"], None, record.value["place"])
            yield record._replace(value=None), no_answers if kind in {"preference", "unpaired"} else ids
            continue
        example: Read
        try:
            example = read_as(record.value, kind, form, columns)
        except RecordProblem as problem:
            example = problem
        yield record, example._replace(ends=block.file.end_token) if isinstance(example, PlainText) else example


def lines_in(block: Block) -> int:
    """Lines of a block, blank ones counted; records where a line is a record. DataError."""
    if block.lines is not None:
        return block.lines
    with source_errors(block.file):
        return sum(part.count(b"\n") for part in parts(block))


def position_of(record: RawRecord, problem: RecordProblem) -> tuple[int, int]:
    """Return line (inside the block, from 1) and column (from 1) of a problem in a record."""
    if record.col == 0:
        return record.line, problem.col or 1
    text = record.raw.decode("utf-8", "replace")
    position = (problem.col or 1) - 1
    if problem.col is None and record.value is not None and problem.path:
        position = locate(text, problem.path)
    before = text[:position]
    lines = before.count("\n")
    return record.line + lines, len(before) - before.rfind("\n") if lines else record.col + position
