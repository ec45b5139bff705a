"""What the pages of a parquet file unpack to, read from their headers: the footer may say anything.

A value of few bytes may mean a long one thousands of times: as an index into a dictionary, or as a value that begins
as the one before. Flat columns are then read in few rows at a time; inside of lists one row may have all of them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from tuner.data.reading.ipc_sizes import AT_ONCE_RATIO
from tuner.errors import DataError

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""Kind of a page -> the field of its header that describes it."""
_INDEXED, _DELTA_BYTES, _RLE = (2, 8), 7, 3
"""Encodings: of values as indices into a dictionary, and as what differs from the value before; of levels."""
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4_RAW": "lz4_raw"}
_HEAD_BYTES, _MOST_HEAD_BYTES = 256, 16 << 20
_DEPTH = 8
_VALUE_BYTES = 16
"""What a value inside of lists takes at least, with its levels."""
_FEW_BYTES = 1 << 20
AT_ONCE_FROM = 64 << 20
"""The pages that are held at a time may unpack to so much, whatever their size."""
REPEATED_BYTES = 32 << 20
"""What rows that are read at a time may take that mean one value several times."""


@dataclass
class Group:
    """What the pages of the columns of a row group say together."""

    row: int = 0
    """The most bytes that a row may mean by few."""
    long: set[str] = field(default_factory=set)
    """Columns inside of lists whose values may mean too much in one row: to be read as indices."""


@dataclass
class _Chunk:
    """What the pages of one column of a row group say."""

    name: str
    in_lists: bool
    values: int = 0
    page: int = 0
    """Bytes of the largest."""
    plain: int = 0
    """Bytes of those that no dictionary belongs to."""
    longest: int = 0
    """The most bytes that a value may have of those that few bytes can mean."""
    repeated: list["_Page"] = field(default_factory=list)
    """The pages that these are in."""
    has_deltas: bool = False


class _Page(NamedTuple):
    header: dict[int, Any]
    at: int
    """Where its body begins."""
    size: int
    unpacked: int

    @property
    def head(self) -> dict[int, Any]:
        """What describes its values."""
        found: dict[int, Any] = self.header[_HEADS[self.header[1]]]
        return found

    @property
    def encoding(self) -> int:
        """Of its values."""
        return int(self.head.get(4 if self.header[1] == _DATA_V2 else 2, -1))


def group_of(file: BinaryIO, facts: Any, schema: Any, path: Path) -> Group:
    """Walk the pages of a row group. DataError for one that unpacks to too much, or has what is no page."""
    columns = [(facts.column(i), schema.column(i)) for i in range(facts.num_columns)]
    size = sum(column.total_compressed_size for column, _ in columns)
    most = max(AT_ONCE_FROM, AT_ONCE_RATIO * size)
    chunks = [_chunk(file, column, path, how.max_repetition_level > 0) for column, how in columns]
    values = sum(chunk.values for chunk in chunks if chunk.in_lists)
    if max(sum(chunk.page for chunk in chunks), values * _VALUE_BYTES) > most:
        raise DataError(
            f"{path}: a row group of {size:,} bytes unpacks to more than {most:,} at once: a decompression bomb",
            hint="where it is none, write the file in smaller pages and row groups",
        )
    group = Group(sum(chunk.longest for chunk in chunks if not chunk.in_lists))
    for chunk, (column, how) in zip(chunks, columns, strict=True):
        if not chunk.in_lists:
            continue
        meant = chunk.longest * sum(page.head[1] for page in chunk.repeated)
        if meant > _FEW_BYTES:
            meant = chunk.longest * _most_of_a_row(file, chunk, column.compression, how.max_repetition_level)
        if group.row + meant <= REPEATED_BYTES:
            group.row += meant
            continue
        if chunk.has_deltas or chunk.plain > REPEATED_BYTES:
            raise DataError(
                f"{path}: {chunk.name}: a row may be {meant:,} bytes long: a decompression bomb",
                hint="where it is none, write the file with neither a dictionary nor DELTA_BYTE_ARRAY for this column",
            )
        group.long.add(chunk.name)
    return group


def _chunk(file: BinaryIO, facts: Any, path: Path, in_lists: bool) -> _Chunk:
    found, dictionary = _Chunk(facts.path_in_schema, in_lists), 0
    is_text = facts.physical_type == "BYTE_ARRAY"
    for page in _pages(file, facts, path):
        found.page = max(found.page, page.unpacked)
        if page.header[1] == _DICTIONARY:
            dictionary = _longest(file, page, facts.compression) if is_text and in_lists else page.unpacked
            continue
        found.values += page.head[1]
        if is_text and page.encoding in (*_INDEXED, _DELTA_BYTES):
            is_delta = page.encoding == _DELTA_BYTES
            found.longest = max(found.longest, page.unpacked if is_delta else dictionary)
            found.has_deltas |= is_delta
            found.repeated.append(page)
        elif is_text:
            found.plain += page.unpacked
    return found


def _pages(file: BinaryIO, facts: Any, path: Path) -> Iterator[_Page]:
    """Yield the pages of a column of a row group. DataError."""
    at = facts.data_page_offset
    if facts.dictionary_page_offset and facts.dictionary_page_offset > 0:
        at = min(at, facts.dictionary_page_offset)
    stop = at + facts.total_compressed_size
    while at < stop:
        try:
            header, length = _header(file, at)
            page = _Page(header, at + length, header[3], header[2])
            count = page.head[1] if header[1] in _HEADS else 0
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{path}: not a readable parquet file: no page at byte {at:,}") from error
        if min(page.size, page.unpacked, count) < 0:
            raise DataError(f"{path}: not a readable parquet file: a page of less than nothing at byte {at:,}")
        if header[1] in _HEADS:
            yield page
        at = page.at + page.size


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """The header of the page that begins at a byte, and its length. IndexError, ValueError where there is none."""
    size = _HEAD_BYTES
    while True:
        file.seek(at)
        data = file.read(size)
        try:
            return _fields(data, 0, 0)
        except IndexError:  # statistics may be of any length
            if len(data) < size or size >= _MOST_HEAD_BYTES:
                raise
            size *= 16


def _fields(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A struct of Thrift's compact protocol: its whole numbers and structs by field, and where it ends."""
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if kind in (1, 2):
            found[number] = kind == 1
        elif kind == 3:
            at += 1
        elif kind in (4, 5, 6):
            found[number], at = _signed(data, at)
        elif kind == 7:
            at += 8
        elif kind == 8:
            length, at = _unsigned(data, at)
            at += length
        elif kind == 12 and depth < _DEPTH:
            found[number], at = _fields(data, at, depth + 1)
        else:
            raise ValueError(f"a field of kind {kind}")
    return found, at + 1


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def _longest(file: BinaryIO, page: _Page, compression: str) -> int:
    """Bytes of the longest text of a dictionary; of all of them where that cannot be told."""
    data = _body(file, page, compression)
    if data is None:
        return page.unpacked
    longest = at = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        longest = max(longest, length)
        at += 4 + length
    return min(longest, page.unpacked)


def _body(file: BinaryIO, page: _Page, compression: str) -> bytes | None:
    """The bytes of a page, unpacked; None where the library has another way to do that."""
    file.seek(page.at)
    data = file.read(page.size)
    if compression == "UNCOMPRESSED":
        return data
    if compression not in _CODECS:
        return None
    unpacked: bytes = pa.Codec(_CODECS[compression]).decompress(data, page.unpacked, asbytes=True)
    return unpacked


def _most_of_a_row(file: BinaryIO, chunk: _Chunk, compression: str, most_level: int) -> int:
    """The most values of one row in the pages of few bytes; all of them where that cannot be told."""
    every: int = sum(page.head[1] for page in chunk.repeated)
    current = most = 0
    for page in chunk.repeated:
        if page.header[1] == _DATA_V2:
            file.seek(page.at)
            levels = file.read(min(max(page.head.get(6, 0), 0), page.size))
        else:
            body = _body(file, page, compression) if page.head.get(4) == _RLE else None
            if body is None or len(body) < 4:
                return every
            levels = body[4 : 4 + int.from_bytes(body[:4], "little")]
        try:
            for values, is_inside in _runs(levels, most_level.bit_length(), page.head[1]):
                most = max(most, current) if not is_inside else most
                current = values + (current if is_inside else 0)
        except (IndexError, ValueError):
            return every
    return max(most, current)


def _runs(levels: bytes, width: int, count: int) -> Iterator[tuple[int, bool]]:
    """Runs of values by their levels of repetition: how many there are, and whether they continue a row.

    A row that begins is a run of its own; of several short ones, only the longest is reported. IndexError.
    """
    at = 0
    while count > 0:
        head, at = _unsigned(levels, at)
        if not head & 1:  # one level many times
            repeats, size = min(head >> 1, count), -(-width // 8)
            is_inside = any(levels[at + k] for k in range(size))
            yield (repeats if is_inside else 1), is_inside
            count, at = count - repeats, at + size
            if not repeats:
                raise IndexError("a run of nothing")
            continue
        size = (head >> 1) * width
        bits = np.unpackbits(np.frombuffer(levels[at : at + size], np.uint8), bitorder="little").reshape(-1, width)
        begins = np.flatnonzero(bits.max(axis=1)[:count] == 0)
        here = min(count, len(bits))
        if not here:
            raise IndexError("a run of nothing")
        if len(begins) == 0:
            yield here, True
        else:
            yield int(begins[0]), True
            if len(begins) > 1:
                yield int(np.diff(begins).max()), False
            yield here - int(begins[-1]), False
        count, at = count - here, at + size
