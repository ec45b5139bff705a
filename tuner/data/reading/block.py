"""A block of records, the unit of work, and a raw record: what every way of reading gives; and the bytes of a file.

Lines are counted inside a block: the line of a record in its file is the lines of the file's earlier blocks plus
`RawRecord.line`. For parquet, Arrow and data sets a line is a record.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa

from tuner.data.reading.problems import RecordProblem, first_line
from tuner.data.sources import SourceFile, source_errors
from tuner.errors import DataError

BLOCK_BYTES = 4 << 20
LINE_BYTES = 8 << 20
"""A longer line or JSON value is a bad record: to encode one takes some 40 times as much memory."""
SHOWN_BYTES = 200
BOM = b"\xef\xbb\xbf"
MAX_RATIO, MAX_GZIP_RATIO = 1000, 250
"""No rows are so many times as long as the file that they are in, over `RATIO_FROM` bytes: it is a bomb.

gzip makes nothing shorter than by 1,032, and texts that are much alike by no more than 100.
"""
RATIO_FROM = 64 << 20
AS_LINES = "where all of that is meant, write the rows as JSON lines that are not compressed"
_BUFFER_BYTES = 1 << 20


class RawRecord(NamedTuple):
    """A record as read: its value, or the problem that made it unreadable."""

    line: int
    """From 1 inside the block."""
    raw: bytes
    """The record as written, or as JSON where its source is no JSON text; the beginning of one that is too long."""
    value: dict[str, Any] | None
    problem: RecordProblem | None
    col: int = 1
    """Column from 1 at which `raw` starts in its line; 0 where `raw` is not what stands there."""


@dataclass(frozen=True)
class Block:
    """Some records of one file; what else is needed to read them is in it."""

    file: SourceFile
    index: int
    start: int = 0
    stop: int = 0
    """Bytes [start, stop) of the uncompressed file, where there is no `data`; of a table, records left out before."""
    data: bytes | None = None
    """Inflated text, or an Arrow stream."""
    spans: bytes = b""
    """JSON values: int64[n, 5] of offset from `start` or in `data`, bytes, line, column, and 1 where too long."""
    header: tuple[str, ...] = ()
    """The columns of a CSV file."""
    lines: int | None = None
    """Lines (records of a table), where the cut found them out."""
    cut: tuple[int, ...] = ()
    """Lines of `data` that were too long, of which it has the beginning."""
    ends: bytes = b""
    """Of an array of ids: int64[records + 1], where its records begin and end."""
    taken: tuple[int, int] | None = None
    """Of a file that is cut: records [start, stop) of the block that are read; None is all."""
    problem: str = ""
    """Why its one record cannot be read, where it has none that can."""

    @property
    def size(self) -> int:
        """Bytes of the records, inflated."""
        if self.data is not None:
            return len(self.data)
        if self.spans:
            return int(np.frombuffer(self.spans, dtype=np.int64).reshape(-1, 5)[:, 1].sum())
        return self.stop - self.start


def parts(block: Block) -> Iterator[bytes]:
    """The bytes of a block's range, in bounded pieces."""
    with block.file.path.open("rb") as file:
        file.seek(block.start)
        left = block.stop - block.start
        while left > 0 and (part := file.read(min(left, BLOCK_BYTES))):
            left -= len(part)
            yield part


def text_of(block: Block) -> bytes:
    """The bytes of a block's text, wherever they are."""
    return b"".join(parts(block)) if block.data is None else block.data


def open_stream(file: SourceFile) -> BinaryIO:
    """Open a file for buffered reading from its start. DataError, also from later reads: truncated, corrupt, a bomb."""
    with source_errors(file):
        if not file.compression:
            return file.path.open("rb", buffering=_BUFFER_BYTES)
        return cast(BinaryIO, io.BufferedReader(_Inflated(file), _BUFFER_BYTES))


class _Inflated(io.RawIOBase):
    """A gzip or zstd file of one or several frames, checked to its end."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._source = pa.OSFile(str(file.path), "rb")
        self._stream = pa.CompressedInputStream(self._source, file.compression)
        self._inflated = 0
        self._ratio = MAX_GZIP_RATIO if file.compression == "gzip" else MAX_RATIO

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from the inflated bytes. DataError."""
        try:
            count = int(self._stream.readinto(buffer))
            consumed = int(self._source.tell())
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self._file.name}: damaged or cut off {self._file.compression} file: {first_line(error)}",
                hint="fetch or compress it again",
            ) from error
        if count == 0 and consumed == 0:
            raise DataError(f"{self._file.name}: an empty file is no {self._file.compression} file")
        self._inflated += count
        if self._inflated > max(RATIO_FROM, self._ratio * consumed):
            raise DataError(
                f"{self._file.name}: {consumed:,} bytes inflate to more than {self._inflated:,}: a decompression bomb",
                hint=AS_LINES,
            )
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
            self._source.close()
        super().close()
