"""The packing plan: documents cut to rows' length, and segments packed into rows.

Memory is bounded by the number of segments, some 40 bytes each at the peak, whatever the number of tokens: columns are
kept in 32 bits, and rows are written in record batches that a list column's 32-bit offsets can address.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.data.bins import pack
from tuner.data.prepared import ROWS_SCHEMA
from tuner.errors import DataError

TooLong = Literal["truncate", "split", "drop"]
NO_TARGET = "no trained token within max_length"
TOO_LONG = "longer than max_length"
MAX_DOCUMENTS = 1 << 32
BATCH_ROWS, BATCH_SEGMENTS = 1 << 16, 1 << 22
"""Rows and segments of one record batch: a batch ends before either bound is passed, but holds a row at least."""

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Segments:
    """Pieces of documents in document order: uint32[n] document, start, stop and trained targets of each."""

    document: U32
    start: U32
    stop: U32
    trained: U32
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> documents of which nothing is left."""
    truncated: int = 0
    split: int = 0

    @property
    def tokens(self) -> U32:
        """uint32[n]: the length of each segment."""
        return self.stop - self.start


def cut(batches: Iterator[pa.RecordBatch], max_length: int, too_long: TooLong) -> Segments:
    """Cut documents into segments of at most `max_length` tokens; those without a trained target are left out.

    Raises DataError for 2^32 documents or more.
    """
    parts: list[list[U32]] = []
    dropped = {TOO_LONG: 0, NO_TARGET: 0}
    base = truncated = n_split = 0
    for batch in batches:
        offsets, targets = _targets_before(batch)
        lengths = np.diff(offsets)
        long = lengths > max_length
        document = np.arange(len(lengths), dtype=np.int64)
        if too_long == "drop":
            dropped[TOO_LONG] += int(long.sum())
            document = document[~long]
        pieces = np.ones(len(document), dtype=np.int64)
        if too_long == "split":
            pieces = -(-lengths[document] // max_length)
            n_split += int(long.sum())
        elif too_long == "truncate":
            truncated += int(long.sum())
        considered = int((pieces > 0).sum())
        number = _counted(pieces)
        document = np.repeat(document, pieces)
        start = number * max_length
        stop = np.minimum(start + max_length, lengths[document])
        # The first token of a segment is never a target.
        trained = targets[offsets[document] + stop] - targets[np.minimum(offsets[document] + start + 1, offsets[-1])]
        kept = trained > 0
        left = np.zeros(len(lengths), dtype=np.bool_)
        left[document[kept]] = True
        dropped[NO_TARGET] += considered - int(left.sum())
        parts.append([column[kept].astype(np.uint32) for column in (document + base, start, stop, trained)])
        base += len(lengths)
        if base > MAX_DOCUMENTS:
            raise DataError(f"more than {MAX_DOCUMENTS:,} documents in one split")
    reasons = {reason: count for reason, count in dropped.items() if count}
    return Segments(
        _joined(parts, 0), _joined(parts, 1), _joined(parts, 2), _joined(parts, 3), reasons, truncated, n_split
    )


def rows_table(segments: Segments, max_length: int, packing: bool) -> pa.Table:
    """Return the packed rows as `ROWS_SCHEMA` says, in several record batches where they are many."""
    return pa.Table.from_batches(row_batches(segments, max_length, packing), ROWS_SCHEMA)


def row_batches(
    segments: Segments, max_length: int, packing: bool, limits: tuple[int, int] = (BATCH_ROWS, BATCH_SEGMENTS)
) -> Iterator[pa.RecordBatch]:
    """Yield the packed rows in record batches of at most `limits` rows and segments (but of a row at least)."""
    count = len(segments.document)
    order, offsets = pack(segments.tokens, max_length) if packing else (np.arange(count), np.arange(count + 1))
    max_rows, max_segments = limits
    first, n_rows = 0, len(offsets) - 1
    while first < n_rows:
        fitting = int(np.searchsorted(offsets, offsets[first] + max_segments, side="right")) - 1
        last = min(max(fitting, first + 1), first + max_rows, n_rows)
        yield _record_batch(segments, order[offsets[first] : offsets[last]], offsets[first : last + 1])
        first = last


def _record_batch(segments: Segments, chosen: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Rows of the `chosen` segments; row i holds those from `offsets[i]` to `offsets[i + 1]`, less the first offset."""
    starts = offsets[:-1] - offsets[0]
    bounds = pa.array((offsets - offsets[0]).astype(np.int32))

    def column(values: U32) -> pa.Array:
        return pa.ListArray.from_arrays(bounds, pa.array(values[chosen]))

    def sums(values: npt.NDArray[Any], dtype: type[np.unsignedinteger[Any]]) -> pa.Array:
        return pa.array(np.add.reduceat(values, starts, dtype=np.uint64).astype(dtype))

    tokens = segments.stop[chosen] - segments.start[chosen]
    return pa.record_batch(
        [
            column(segments.document),
            column(segments.start),
            column(segments.stop),
            sums(tokens, np.uint32),
            sums(segments.trained[chosen], np.uint32),
            sums(tokens.astype(np.uint64) ** 2, np.uint64),
        ],
        schema=ROWS_SCHEMA,
    )


def _joined(parts: list[list[U32]], column: int) -> U32:
    """One column of all parts, which let go of theirs: the four columns are never in memory twice."""
    joined = np.concatenate([np.empty(0, np.uint32), *(part[column] for part in parts)])
    for part in parts:
        part[column] = np.empty(0, np.uint32)
    return joined


def _counted(pieces: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ... for the pieces of each document in turn."""
    return np.arange(pieces.sum(), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)


def _targets_before(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Offsets of a batch's documents, from 0, and int32[tokens + 1]: trained tokens before each position."""
    column = batch.column("trained")
    offsets = column.offsets.to_numpy().astype(np.int64)
    flags = column.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False)
    before = np.zeros(len(flags) + 1, dtype=np.int32)
    np.cumsum(flags, out=before[1:])
    return offsets - offsets[0], before
