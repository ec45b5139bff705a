"""The packing plan: documents cut to rows' length, and segments packed by global best fit decreasing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

TooLong = Literal["truncate", "split", "drop"]
NO_TARGET = "no trained token within max_length"
TOO_LONG = "longer than max_length"


@dataclass(frozen=True)
class Segments:
    """Pieces of documents in document order: int64[n] document, start, stop and trained targets of each."""

    document: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> documents of which nothing is left."""
    truncated: int = 0
    split: int = 0

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """int64[n]: the length of each segment."""
        return self.stop - self.start


def cut(batches: Iterator[pa.RecordBatch], max_length: int, too_long: TooLong) -> Segments:
    """Cut documents into segments of at most `max_length` tokens; those without a trained target are left out."""
    parts: list[list[npt.NDArray[np.int64]]] = []
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
        document = np.repeat(document, pieces)
        number = np.arange(len(document), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = number * max_length
        stop = np.minimum(start + max_length, lengths[document])
        # The first token of a segment is never a target.
        trained = targets[offsets[document] + stop] - targets[np.minimum(offsets[document] + start + 1, offsets[-1])]
        kept = trained > 0
        left = np.zeros(len(lengths), dtype=np.bool_)
        left[document[kept]] = True
        dropped[NO_TARGET] += len(np.unique(document)) - int(left.sum())
        parts.append([document[kept] + base, start[kept], stop[kept], trained[kept]])
        base += len(lengths)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [np.empty(0, np.int64)] * 4
    document, start, stop, trained = columns
    reasons = {reason: count for reason, count in dropped.items() if count}
    return Segments(document, start, stop, trained, reasons, truncated, n_split)


def pack(lengths: npt.NDArray[np.int64], capacity: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pack items into rows of `capacity` by best fit decreasing; returns (item ids row by row, row offsets).

    Rows with r tokens free are kept in stack r, and a big integer has bit r set where stack r is not empty: the
    fullest row that still takes an item is the lowest set bit at or above its length. Items of equal length are taken
    in order, so the plan is a function of the lengths alone. Inside a row items are in ascending order.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    free_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    occupied = n_rows = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = occupied >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            stack = free_rows[free]
            row = stack.pop()
            if not stack:
                occupied ^= 1 << free
        else:
            free, row = capacity, n_rows
            n_rows += 1
        row_of[item] = row
        left = free - length
        if left:
            if not free_rows[left]:
                occupied |= 1 << left
            free_rows[left].append(row)
    order = np.argsort(row_of, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))]).astype(np.int64)
    return order, offsets


def rows_table(segments: Segments, max_length: int, packing: bool) -> pa.Table:
    """Return the packed rows: segments as lists, `tokens` and `trained` targets of each row."""
    count = len(segments.document)
    order, offsets = pack(segments.tokens, max_length) if packing else (np.arange(count), np.arange(count + 1))
    bounds = pa.array(offsets.astype(np.int32))

    def column(values: npt.NDArray[np.int64]) -> pa.Array:
        return pa.ListArray.from_arrays(bounds, pa.array(values[order].astype(np.uint32)))

    def sums(values: npt.NDArray[np.int64]) -> pa.Array:
        total = np.concatenate([[0], np.cumsum(values[order])])
        return pa.array(np.diff(total[offsets]).astype(np.uint32))

    return pa.table(
        {
            "document": column(segments.document),
            "start": column(segments.start),
            "stop": column(segments.stop),
            "tokens": sums(segments.tokens),
            "trained": sums(segments.trained),
        }
    )


def _targets_before(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Offsets of a batch's documents, from 0, and int64[tokens + 1]: trained tokens before each position."""
    column = batch.column("trained")
    offsets = column.offsets.to_numpy().astype(np.int64)
    flags = column.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False)
    return offsets - offsets[0], np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
