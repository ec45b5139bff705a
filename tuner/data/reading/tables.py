"""Arrow and parquet files in record batches of bounded size, decoded by the caller, block by block."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from tuner.data.reading.arrow_values import plain_records
from tuner.data.reading.block import BLOCK_BYTES, MAX_RATIO, RATIO_FROM, Block, RawRecord
from tuner.data.reading.data_sets import arrow_batches, first_line
from tuner.data.reading.problems import RecordProblem
from tuner.data.sources import SourceFile
from tuner.errors import DataError

MAX_BATCH_ROWS = 8192
_REPEATED_BYTES = 64 << 20
"""What the rows of a batch may take that mean one value of a dictionary each."""
_DICTIONARY_PAGE = 2


def parquet_batches(path: Path, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield record batches of about `batch_bytes`; a row group is never held whole. DataError."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            facts = file.metadata
            size = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
            records = batch_bytes * facts.num_rows // max(size, 1)
            records = min(records, _REPEATED_BYTES // max(_largest_dictionary(path, facts), 1))
            yield from file.iter_batches(batch_size=min(max(records, 1), MAX_BATCH_ROWS), use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {first_line(error)}") from error


def _largest_dictionary(path: Path, facts: Any) -> int:
    """The most bytes that the dictionaries of a row group hold: a row may be as long. DataError for a bomb.

    A file does not say how long the values are, and a few bytes mean a long one thousands of times.
    """
    largest = 0
    with path.open("rb") as file:
        for group in (facts.row_group(i) for i in range(facts.num_row_groups)):
            size = 0
            for column in (group.column(i) for i in range(group.num_columns)):
                if column.total_uncompressed_size > max(RATIO_FROM, MAX_RATIO * column.total_compressed_size):
                    raise DataError(f"{path}: {column.path_in_schema}: a decompression bomb")
                if column.physical_type == "BYTE_ARRAY":
                    file.seek(column.dictionary_page_offset or column.data_page_offset)
                    size += _dictionary_bytes(path, file.read(16)) * -(-column.num_values // max(group.num_rows, 1))
            largest = max(largest, size)
    return largest


def _dictionary_bytes(path: Path, head: bytes) -> int:
    """Bytes of the page that begins so, where it is a dictionary: its header begins with its kind and its size."""
    kind, rest = _number(head)
    size, _ = _number(rest)
    if kind is None or size is None:
        raise DataError(f"{path}: not a readable parquet file: a page without kind and size")
    return size if kind == _DICTIONARY_PAGE else 0


def _number(head: bytes) -> tuple[int | None, bytes]:
    """The next field of a header in Thrift's compact protocol, a number of 32 bits, and what follows it."""
    value = 0
    for at, byte in enumerate(head[1:6]):
        value |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            return (value >> 1 if head[0] == 0x15 else None), head[at + 2 :]
    return None, b""


def _repeated_bytes(array: pa.Array) -> int:
    """The most bytes that values take which an array holds once and means several times."""
    kind = array.type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        import pyarrow.compute as pc

        values = array.dictionary if pa.types.is_dictionary(kind) else array.values
        texts = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        longest = pc.max(pc.binary_length(values)).as_py() if texts and len(values) else values.nbytes
        return len(array) * int(longest or 0)
    if pa.types.is_struct(kind):
        return sum(map(_repeated_bytes, array.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _repeated_bytes(array.flatten())
    return 0


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
        size += _bytes_of(batch)
    if held:
        yield _table_block(file, index, held, first)


def _bytes_of(batch: pa.RecordBatch) -> int:
    """Bytes of its rows, each with all that it means."""
    return int(batch.nbytes) + sum(map(_repeated_bytes, batch.columns))


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
            step = max(1, batch.num_rows * BLOCK_BYTES // max(_bytes_of(batch), 1))
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
