"""What the batches of an Arrow file unpack to, read from their headers before a library allocates it.

A compressed batch is unpacked at once. Its header lists its buffers, and each buffer begins with its size unpacked.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tuner.errors import DataError

AT_ONCE_RATIO, AT_ONCE_FROM = 100, 256 << 20
"""A batch unpacks to no more than so many times its bytes, over some: 65,536 rows, which libraries write in one."""
_MAGIC, _MARK = b"ARROW1", 0xFFFFFFFF
_DICTIONARY, _BATCH = 2, 3
"""Kinds of messages."""


def refuse_bombs(path: Path, data: pa.Buffer) -> None:
    """Raise DataError for a batch, or dictionaries, of a file or stream that unpack to too much; `data` is all of it.

    What is no Arrow file is left to the library.
    """
    view = memoryview(data)
    packed = unpacked = 0
    try:
        for at, body in _file(view) if view[:6] == _MAGIC else _stream(view):
            kind, size, length = _message(view, at, body)
            if kind == _DICTIONARY:  # all of them are held together
                packed, unpacked = packed + length, unpacked + size
                length, size = packed, unpacked
            if size > max(AT_ONCE_FROM, AT_ONCE_RATIO * length):
                raise DataError(
                    f"{path}: a batch of {length:,} bytes unpacks to {size:,}: a decompression bomb",
                    hint="where it is none, write the file in smaller batches",
                )
    except (struct.error, IndexError, ValueError) as error:
        raise DataError(f"{path}: not a readable Arrow file: its headers lead out of it") from error


def _file(view: memoryview) -> Iterator[tuple[int, int]]:
    """Where the header and the body of each message of a file begin, by its last table."""
    (length,) = struct.unpack_from("<i", view, len(view) - 10)
    footer = len(view) - 10 - length
    table = footer + _number(view, footer, "<I")
    for field in (2, 3):
        for block in _items(view, table, field, 24):
            at, header = struct.unpack_from("<qi", view, block)
            yield at + (8 if _number(view, at, "<I") == _MARK else 4), at + header


def _stream(view: memoryview) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 8 <= len(view):
        mark, length = struct.unpack_from("<II", view, at)
        at, length = (at + 8, length) if mark == _MARK else (at + 4, mark)
        if length == 0:
            return
        yield at, at + length
        at += length
        table = at - length + _number(view, at - length, "<I")
        body = _field(view, table, 3)
        at += 0 if body is None else _number(view, body, "<q")


def _message(view: memoryview, at: int, body: int) -> tuple[int, int, int]:
    """The kind of a message, the bytes of its buffers unpacked, and as they are."""
    table = at + _number(view, at, "<I")
    kind, header = _field(view, table, 1), _field(view, table, 2)
    if kind is None or header is None or view[kind] not in (_DICTIONARY, _BATCH):
        return 0, 0, 0
    batch = header + _number(view, header, "<I")
    if view[kind] == _DICTIONARY:
        inside = _field(view, batch, 1)
        if inside is None:
            return 0, 0, 0
        batch = inside + _number(view, inside, "<I")
    unpacked = packed = 0
    if _field(view, batch, 3) is not None:
        for buffer in _items(view, batch, 2, 16):
            offset, length = struct.unpack_from("<qq", view, buffer)
            packed += length
            unpacked += max(_number(view, body + offset, "<q"), 0) if length >= 8 else 0
    return view[kind], unpacked, packed


def _field(view: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table is; None where it is left out."""
    names = table - _number(view, table, "<i")
    size = _number(view, names, "<H")
    offset = _number(view, names + 4 + 2 * number, "<H") if 4 + 2 * number < size else 0
    return table + offset if offset else None


def _items(view: memoryview, table: int, number: int, size: int) -> range:
    """Where the items of a vector of structs are."""
    field = _field(view, table, number)
    if field is None:
        return range(0)
    vector = field + _number(view, field, "<I")
    count = _number(view, vector, "<I")
    if vector + 4 + count * size > len(view):
        raise ValueError("a list that is longer than the file")
    return range(vector + 4, vector + 4 + count * size, size)


def _number(view: memoryview, at: int, kind: str) -> int:
    if at < 0:
        raise ValueError("a place before the file")
    number: int = struct.unpack_from(kind, view, at)[0]
    return number
