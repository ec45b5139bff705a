"""Arrow and parquet files in record batches of bounded size, decoded by the caller, block by block."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from tuner.data.reading.arrow_values import plain_records, unfolded, unpacked_bytes
from tuner.data.reading.block import AS_LINES, BLOCK_BYTES, LINE_BYTES, MAX_RATIO, RATIO_FROM, Block, RawRecord
from tuner.data.reading.data_sets import arrow_batches
from tuner.data.reading.problems import RecordProblem, first_line
from tuner.data.sources import SourceFile
from tuner.errors import DataError

MAX_BATCH_ROWS = 1024
_ROW_BYTES = 32
"""What a row takes at least, though it may have nothing in it."""
_NUMBERS = 4
"""A row of numbers may be so many times as long as one of text: they are ids, eight bytes each."""


def parquet_batches(path: Path, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield record batches of about `batch_bytes`; a row group is never held whole. DataError.

    Texts of a dictionary stay one, since thousands of rows may mean a long one; but not where they are many: a batch
    would hold those of all batches before it in the row group.
    """
    import pyarrow.parquet as pq

    how = {"buffer_size": 1 << 20, "pre_buffer": False}
    try:
        with pq.ParquetFile(path, **how) as file:
            facts = file.metadata
            groups = [facts.row_group(i) for i in range(facts.num_row_groups)]
        columns = [group.column(i) for group in groups for i in range(facts.num_columns)]
        folded = {column.path_in_schema for column in columns if "DICTIONARY" in str(column.encodings)}
        wide = {column.path_in_schema for column in columns if column.total_uncompressed_size > batch_bytes}
        with pq.ParquetFile(path, read_dictionary=sorted(folded - wide), **how) as file:
            records = batch_bytes * facts.num_rows // max(sum(group.total_byte_size for group in groups), 1)
            records = min(max(records, 1), MAX_BATCH_ROWS)
            for group in range(len(groups)):  # a batch of lists has one dictionary
                yield from file.iter_batches(batch_size=records, row_groups=[group], use_threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
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
    held: _Held | None = None
    first = file.records[0] if file.records else 0
    index = 0
    for piece, size in _pieces(file):
        problem = _problem(piece, size)
        if held and (problem or held.size >= BLOCK_BYTES or not held.schema.equals(piece.schema, check_metadata=True)):
            yield held.block(file, index, first)
            held, index, first = None, index + 1, 0
        if problem:
            yield Block(file, index, first, data=b"", lines=first + 1, problem=problem)
            index, first = index + 1, 0
        else:
            held = held or _Held(piece.schema)
            held.add(piece, size)
        del piece  # the rest of its batch would stay with it while the next one is unpacked
    if held:
        yield held.block(file, index, first)


class _Held:
    """The records of a block, as an Arrow stream that grows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.size = 0
        self._count = 0
        self._sink = pa.BufferOutputStream()
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch, size: int) -> None:
        """Add records of so many bytes."""
        plain = unfolded(batch)
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._sink, plain.schema)
        self._writer.write_batch(plain)
        self.size += size
        self._count += batch.num_rows

    def block(self, file: SourceFile, index: int, before: int) -> Block:
        """The block, whose first record comes after `before` records that are left out."""
        self._writer.close()
        return Block(file, index, before, data=bytes(self._sink.getvalue()), lines=before + self._count)


def _problem(piece: pa.RecordBatch, size: int) -> str:
    """Why a row cannot be used, where the piece is only that."""
    if size < 0:
        return "not UTF-8"
    if piece.num_rows > 1 or size <= LINE_BYTES:
        return ""
    texts, every = (sum(unpacked_bytes(column, only) for column in piece.columns) for only in (True, False))
    is_long = texts > LINE_BYTES or every > _NUMBERS * LINE_BYTES
    return f"the row is longer than {LINE_BYTES >> 20} MiB" if is_long else ""


def _bytes_of(batch: pa.RecordBatch) -> int:
    """Bytes of its rows, each with all that it means."""
    return sum(map(unpacked_bytes, batch.columns)) + _ROW_BYTES * int(batch.num_rows)


def _pieces(file: SourceFile) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The records that are read, in batches of no more than about BLOCK_BYTES, and the bytes of each. DataError.

    A row of texts that are none comes alone, with -1 for its bytes.
    """
    start, stop = file.records or (0, 1 << 62)
    record = total = 0
    most = max(RATIO_FROM, MAX_RATIO * file.size())
    for path in file.paths:
        batches = parquet_batches(path, BLOCK_BYTES) if file.kind == "parquet" else arrow_batches(path)
        try:
            while (batch := next(batches, None)) is not None:
                names = batch.schema.names
                if len(set(names)) < len(names):
                    raise DataError(f"{path}: two columns of one name: {', '.join(names)}")
                begin, end = max(start - record, 0), min(stop - record, batch.num_rows)
                record += batch.num_rows
                pieces = _sound(batch.slice(begin, max(end - begin, 0)), file.kind == "parquet")
                del batch
                for piece, size in pieces:
                    total += abs(size)
                    if total > most:
                        unpacked = f"its first {record:,} rows unpack to more than {most:,} bytes"
                        raise DataError(f"{path}: {unpacked}: a decompression bomb", hint=AS_LINES)
                    yield piece, size
                    del piece
        except (ValueError, pa.ArrowException) as error:
            raise DataError(f"{path}: damaged: {first_line(error)}") from error


def _sound(batch: pa.RecordBatch, is_made_here: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The pieces of a batch once its places and indices are shown to lead nowhere else. ArrowException.

    Some rows at a time: to look at every text takes long where many mean one. Where a dictionary has a text that is
    none, the library's own places and indices (`is_made_here`) are good enough to look at what each row means of it.
    """
    if batch.num_rows > MAX_BATCH_ROWS:
        for at in range(0, batch.num_rows, MAX_BATCH_ROWS):
            yield from _sound(batch.slice(at, MAX_BATCH_ROWS), is_made_here)
        return
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        if batch.num_rows == 1:
            plain = unfolded(batch) if is_made_here else batch
            yield from [(batch, -1)] if plain.schema.equals(batch.schema) else _sound(plain, is_made_here)
            return
        half = batch.num_rows // 2
        yield from _sound(batch.slice(0, half), is_made_here)
        yield from _sound(batch.slice(half), is_made_here)
    else:
        yield from _cut(batch)


def _cut(batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    size = _bytes_of(batch)
    step = max(1, batch.num_rows * BLOCK_BYTES // max(size, 1))
    if step >= batch.num_rows:
        if batch.num_rows:
            yield batch, size
        return
    for at in range(0, batch.num_rows, step):
        size = _bytes_of(piece := batch.slice(at, step))
        if size > 2 * BLOCK_BYTES and step > 1:  # long rows next to each other
            yield from _cut(piece)
        else:
            yield piece, size


def table_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block."""
    assert block.data is not None
    if block.problem:
        yield RawRecord(block.start + 1, b"", None, RecordProblem(block.problem), 0)
        return
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
