"""A block of records, the unit of work, and a raw record: what every way of reading gives.

Lines are counted inside a block: the line of a record in its file is the lines of the file's earlier blocks plus
`RawRecord.line`. For parquet, Arrow and data sets a line is a record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tuner.data.reading.problems import RecordProblem
from tuner.data.sources import SourceFile

BLOCK_BYTES = 4 << 20
LINE_BYTES = 64 << 20
"""A longer line or JSON value is a bad record: memory stays bounded."""
SHOWN_BYTES = 200
BOM = b"\xef\xbb\xbf"


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
