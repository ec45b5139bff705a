"""Arrow and parquet files in record batches of bounded size, decoded by the caller, block by block, to plain values.

Arrow has one set of keys for all structs of a column and fills with null what a record does not have, at every depth.
Which nulls somebody wrote cannot be told from these, so all of them are left out. Where nothing is filled in, nulls
stay: elements of lists, values of maps and of unions, and JSON, as text or in a column of that type.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

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


def _records(batch: pa.RecordBatch) -> Iterable[dict[str, Any] | RecordProblem]:
    """The rows of a batch as plain records. One that is no text is a problem."""
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
    values = (value for batch in pa.ipc.open_stream(block.data) for value in _records(batch))
    for line, value in enumerate(values, block.start + 1):
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


_TEXTS = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
    pa.types.is_fixed_size_binary, pa.types.is_string_view, pa.types.is_binary_view,
)  # fmt: skip

_VALUE_BYTES, _OBJECT_BYTES = 8, 32
"""What a value, a list or an object takes at least once it is read, though a null may take nothing in the file."""


def unpacked_bytes(array: Any, texts: bool = False) -> int:
    """Bytes of the values of an array; with `texts`, of its texts alone."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return unpacked_bytes(array.storage, texts)
    if pa.types.is_dictionary(kind):
        return _of_dictionary(array, texts)
    if pa.types.is_run_end_encoded(kind):
        return len(array) * _longest(array.values, texts)
    objects = 0 if texts else _OBJECT_BYTES * len(array)
    if pa.types.is_struct(kind):
        return sum(unpacked_bytes(field, texts) for field in array.flatten()) + objects
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return unpacked_bytes(array.flatten(), texts) + objects
    if pa.types.is_map(kind):
        first, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(unpacked_bytes(part.slice(first, stop - first), texts) for part in (array.keys, array.items))
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return _of_list_view(array, texts)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _of_views(array)
    if any(is_text(kind) for is_text in _TEXTS):
        return int(array.nbytes)
    return 0 if texts else max(int(array.nbytes), _VALUE_BYTES * len(array))


def _of_dictionary(array: Any, texts: bool) -> int:
    """The sum over the values that are meant, where they are texts; else as if each were all of the dictionary."""
    import pyarrow.compute as pc

    values = array.dictionary
    if not _has_lengths(values.type):
        return len(array) * (8 if pa.types.is_primitive(values.type) else unpacked_bytes(values, texts))
    return int(pc.sum(pc.take(pc.binary_length(values), array.indices)).as_py() or 0) + 4 * len(array)


def _longest(values: Any, texts: bool) -> int:
    import pyarrow.compute as pc

    if not _has_lengths(values.type):
        return unpacked_bytes(values, texts)
    return int(pc.max(pc.binary_length(values)).as_py() or 0) if len(values) else 0


def _has_lengths(kind: Any) -> bool:
    return any(is_text(kind) for is_text in _TEXTS[:4])


def _of_list_view(array: Any, texts: bool) -> int:
    """As if each list were all of the values, where two of them share some."""
    offsets, sizes = (part.to_numpy(zero_copy_only=False).astype(np.int64) for part in (array.offsets, array.sizes))
    offsets, sizes = offsets[sizes > 0], sizes[sizes > 0]
    if not len(sizes):
        return _OBJECT_BYTES * len(array)
    order = np.argsort(offsets)
    stops = offsets + sizes
    shares = stops[order][:-1] > offsets[order][1:]
    values = array.values.slice(int(offsets.min()), int(stops.max() - offsets.min()))
    return unpacked_bytes(values, texts) * (len(sizes) if shares.any() else 1) + _OBJECT_BYTES * len(array)


def _of_views(array: Any) -> int:
    """Views say how long each text is; several may be of the same bytes."""
    views = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, 4)[array.offset : array.offset + len(array)]
    return int(views[:, 0].sum(dtype=np.int64)) + 16 * len(array)


def unfolded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch with each text in its own row: a dictionary would go along with every slice of it."""
    columns = [_unfolded(column, _plain(column.type)) for column in batch.columns]
    fields = [field.with_type(column.type) for field, column in zip(batch.schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


def _unfolded(column: Any, kind: Any) -> Any:
    if kind.equals(column.type):
        return column
    return column.take(pa.array(range(len(column)), pa.int64())).cast(kind)  # a cast unfolds all before a slice, too


def _plain(kind: Any) -> Any:
    if pa.types.is_dictionary(kind) and _has_lengths(kind.value_type):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return kind


Decode = Callable[[Any], Any]
_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
    pa.types.is_list_view, pa.types.is_large_list_view,
)  # fmt: skip


def plain_records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch; a column's own null stays, which counts as absent, so that messages can name it.

    A map whose keys are strings becomes an object. Raises ValueError (also for a map with a key twice), OverflowError
    and ArrowException for a value that Python cannot hold.
    """
    records: list[dict[str, Any]] = batch.to_pylist()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        decode = _decoder(column)
        if decode is not None:
            for record in records:
                if record[name] is not None:
                    record[name] = decode(record[name])
    return records


def _decoder(array: Any) -> Decode | None:
    """How a value of an array, not null, becomes plain; None where all are already: most columns cost nothing."""
    kind = array.type
    if isinstance(kind, pa.JsonType):
        return orjson.loads
    if isinstance(kind, pa.BaseExtensionType):
        return _decoder(array.storage) if pa.types.is_nested(kind.storage_type) else None
    if pa.types.is_dictionary(kind):
        return _decoder(array.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _decoder(array.values)
    if any(is_lists(kind) for is_lists in _LISTS):
        inner = _decoder(array.values)
        return inner and (lambda items: [item if item is None else inner(item) for item in items])
    if pa.types.is_struct(kind):
        return _of_struct({field.name: array.field(i) for i, field in enumerate(kind)})
    return _of_map(array) if pa.types.is_map(kind) else None


def _of_struct(fields: dict[str, Any]) -> Decode | None:
    inside = {name: inner for name, values in fields.items() if (inner := _decoder(values)) is not None}
    if not inside and not any(values.null_count for values in fields.values()):
        return None

    def decode(value: dict[str, Any]) -> dict[str, Any]:
        plain = {name: item for name, item in value.items() if item is not None}
        for key, of_key in inside.items():
            if key in plain:
                plain[key] = of_key(plain[key])
        return plain

    return decode


def _of_map(array: Any) -> Decode:
    inner = _decoder(array.items)
    has_names = pa.types.is_string(array.type.key_type) or pa.types.is_large_string(array.type.key_type)

    def decode(pairs: list[tuple[Any, Any]]) -> Any:
        plain = [(key, item if inner is None or item is None else inner(item)) for key, item in pairs]
        value = dict(plain) if has_names else plain
        if len(value) < len(pairs):
            raise ValueError("a map with two values of one key")
        return value

    return decode
