"""Arrow and parquet files in record batches of bounded size, decoded by the caller, block by block."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from tuner.data.reading.arrow_values import plain_records
from tuner.data.reading.block import BLOCK_BYTES, Block, RawRecord
from tuner.data.reading.data_sets import arrow_batches, first_line
from tuner.data.reading.problems import RecordProblem
from tuner.data.sources import SourceFile
from tuner.errors import DataError

MAX_BATCH_ROWS = 8192


def parquet_batches(path: Path, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield record batches of about `batch_bytes`; a row group is never held whole. DataError."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            facts = file.metadata
            size = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            records = batch_bytes * facts.num_rows // max(size, 1)
            yield from file.iter_batches(batch_size=min(max(records, 1), MAX_BATCH_ROWS), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {first_line(error)}") from error


def _values(data: bytes) -> Iterator[dict[str, Any] | RecordProblem]:
    """Yield the rows of an Arrow stream as plain records. One that is no text is a problem."""
    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            yield from _records(batch)


def _records(batch: pa.RecordBatch) -> Iterable[dict[str, Any] | RecordProblem]:
    try:
        return plain_records(batch)
    except (OverflowError, ValueError, pa.ArrowException) as error:  # a date, a time zone, a map that Python has not
        if batch.num_rows > 1:
            return [record for i in range(batch.num_rows) for record in _records(batch.slice(i, 1))]
        if isinstance(error, UnicodeDecodeError):
            return [RecordProblem(f"not UTF-8: byte 0x{error.object[error.start]:02x}")]
        return [RecordProblem(f"not readable: {first_line(error)}")]


def table_blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a table; its records go along with each block. DataError."""
    held: list[pa.RecordBatch] = []
    first = file.records[0] if file.records else 0
    size, index = 0, 0
    for batch in _pieces(file):
        if held and (size >= BLOCK_BYTES or not batch.schema.equals(held[0].schema, check_metadata=True)):
            yield _table_block(file, index, held, first)
            held, size, index, first = [], 0, index + 1, 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield _table_block(file, index, held, first)


def _table_block(file: SourceFile, index: int, batches: list[pa.RecordBatch], before: int) -> Block:
    """A block whose first record comes after `before` records that are left out."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    count = sum(batch.num_rows for batch in batches)
    return Block(file, index, before, data=bytes(sink.getvalue()), lines=before + count)


def _pieces(file: SourceFile) -> Iterator[pa.RecordBatch]:
    """The records that are read, in batches of no more than about BLOCK_BYTES."""
    start, stop = file.records or (0, 1 << 62)
    record = 0
    for path in file.paths:
        for batch in parquet_batches(path, BLOCK_BYTES) if file.kind == "parquet" else arrow_batches(path):
            names = batch.schema.names
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns of one name: {', '.join(names)}")
            begin, end = max(start - record, 0), min(stop - record, batch.num_rows)
            record += batch.num_rows
            step = max(1, batch.num_rows * BLOCK_BYTES // max(batch.nbytes, 1))
            for at in range(begin, end, step):
                yield batch.slice(at, min(step, end - at))


def table_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block."""
    assert block.data is not None
    for line, value in enumerate(_values(block.data), block.start + 1):
        if isinstance(value, RecordProblem):
            yield RawRecord(line, b"", None, value, 0)
            continue
        raw = orjson.dumps(value, default=str)
        if b"\\u0000" in raw and _has_nul(value):
            yield RawRecord(line, raw, None, RecordProblem("NUL character"), 0)
        else:
            yield RawRecord(line, raw, value, None, 0)


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(map(_has_nul, value)) or any(map(_has_nul, value.values()))
    return isinstance(value, list) and any(map(_has_nul, value))
