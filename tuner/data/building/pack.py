"""The packing plan: documents cut to rows' length, and segments packed into rows.

Memory is some 40 bytes for each segment of a block of documents, whatever the number of tokens: columns are kept in 32
bits, and rows are written in record batches that a list column's 32-bit offsets can address. Up to `BLOCK_SEGMENTS`
segments are one block; more are packed block by block, so that a billion documents take the memory of one block.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.data.building.bins import pack
from tuner.data.prepared import ROWS_SCHEMA, Flags, arrow, view
from tuner.data.ranges import offsets_of, ranges
from tuner.errors import DataError

TooLong = Literal["truncate", "split", "drop"]
NO_TRAINED_TOKEN, REPEATS = "no trained token", "repeats a pattern"
"""Why a document is not encoded; below, why one is in no row."""
NO_TARGET = "no trained token within max_length"
TOO_LONG = "longer than max_length"
LOSSES = ("truncated", "cut_prompts", "split", "dropped_pieces", "dropped_piece_tokens")
"""Documents that are cut; pairs of which the beginning of the prompt is left out; documents in several pieces; pieces
without a trained target, and short last ones, of documents of which other pieces are kept, and their tokens."""
MAX_DOCUMENTS = 1 << 32
BLOCK_SEGMENTS = 1 << 25
"""Segments that are packed at once: what is below has one block. It decides the rows of what is above."""
BATCH_ROWS, BATCH_SEGMENTS = 1 << 16, 1 << 19
"""Rows and segments of one record batch: a batch ends before either bound is passed, but holds a row at least."""

U32 = npt.NDArray[np.uint32]


class CutSoFar(NamedTuple):
    """What the blocks before leave to the next one."""

    documents: int = 0
    """Those that were read."""
    row: tuple[U32, ...] = ()
    """Of a row that is begun, where rows are cut: document, stop, trained and start of its segments."""


_NOTHING = CutSoFar()


@dataclass(frozen=True)
class Segments:
    """Pieces of documents in document order: uint32[n] document, start, stop and trained targets of each."""

    document: U32
    start: U32
    stop: U32
    trained: U32
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> documents of which nothing is left."""
    losses: Counter[str] = field(default_factory=Counter)
    """What of the others is cut, by the names in LOSSES."""
    rows: npt.NDArray[np.int64] | None = None
    """int64[rows + 1]: where rows begin and end, where that is decided."""
    each: int = 1
    """Neighbours that stand next to each other in a row: the documents of an example."""
    carried: CutSoFar = _NOTHING

    @property
    def tokens(self) -> U32:
        """uint32[n]: the length of each segment."""
        return self.stop - self.start


def in_blocks(
    batches: Iterator[pa.RecordBatch], max_length: int, segments: int | None = None
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Divide record batches of documents into blocks, each of which is to be read to its end before the next.

    A block ends with the batch in which its documents, and the full rows in them, reach so many `segments`
    (`BLOCK_SEGMENTS`): it is cut into at most these, and what follows depends on the documents alone.
    """

    def block(first: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        size = 0
        for batch in chain([first], batches):
            offsets = batch.column("trained").offsets
            size += batch.num_rows + (offsets[-1].as_py() - offsets[0].as_py()) // max_length
            yield batch
            if size >= (segments or BLOCK_SEGMENTS):
                return

    for first in batches:
        yield block(first)


def cut(
    batches: Iterator[pa.RecordBatch], max_length: int, too_long: TooLong, each: int = 1, max_prompt: int | None = None,
    min_piece: int = 0, carried: CutSoFar = _NOTHING,
) -> Segments:
    """Cut documents into segments of at most `max_length` tokens; those without a trained target are left out.

    So is the last of several pieces of a document where it has fewer tokens than `min_piece`.
    Where `each` is 2, documents are pairs, of which both fit together or both are left out, and pairs are counted;
    of a prompt with more tokens than `max_prompt` the last ones are kept. Raises DataError for 2^32 documents or more.
    """
    if each == 2:
        return _cut_pairs(batches, max_length, too_long, max_prompt, carried.documents)
    segments = _Columns(3 + (too_long == "split"), carried.documents)
    for before, offsets in segments.read(batches):
        lengths = np.diff(offsets)
        long = lengths > max_length
        document = np.arange(len(lengths), dtype=np.int64)
        pieces = np.ones(len(document), dtype=np.int64)
        if too_long == "split":
            pieces = -(-lengths // max_length)
            segments.losses["split"] += int(long.sum())
        elif too_long == "truncate":
            segments.losses["truncated"] += int(long.sum())
        else:
            segments.dropped[TOO_LONG] += int(long.sum())
            document, pieces = document[~long], pieces[~long]
        considered = int((pieces > 0).sum())
        number = ranges(0, pieces)
        document = np.repeat(document, pieces)
        start = number * max_length
        stop = np.minimum(start + max_length, lengths[document])
        # The first token of a segment is never a target.
        trained = before[offsets[document] + stop] - before[np.minimum(offsets[document] + start + 1, offsets[-1])]
        kept = (trained > 0) & ((number == 0) | (stop - start >= min_piece))
        left = np.zeros(len(lengths), dtype=np.bool_)
        left[document[kept]] = True
        segments.dropped[NO_TARGET] += considered - int(left.sum())
        lost = ~kept & left[document]
        segments.losses["dropped_pieces"] += int(lost.sum())
        segments.losses["dropped_piece_tokens"] += int((stop - start)[lost].sum())
        columns = (document[kept] + segments.documents, stop[kept], trained[kept])
        segments.append((*columns, start[kept]) if too_long == "split" else columns)
    return segments.cut()


def _cut_pairs(
    batches: Iterator[pa.RecordBatch], max_length: int, too_long: TooLong, max_prompt: int | None, base: int
) -> Segments:
    """Keep the pairs of documents that fit into a row, or cut them; both documents of a pair are treated alike."""
    segments = _Columns(3 + (max_prompt is not None), base)
    for before, offsets in segments.read(batches):
        none = np.zeros(len(offsets) - 1, dtype=np.int64)
        skipped = none if max_prompt is None else np.maximum(_prompts(before, offsets) - max_prompt, 0)
        starts, lengths = offsets[:-1] + skipped, np.diff(offsets) - skipped
        both = lengths.reshape(-1, 2)
        segments.losses["cut_prompts"] += int((skipped > 0).reshape(-1, 2).any(axis=1).sum())
        long = both.sum(axis=1) > max_length
        stop = lengths
        if too_long == "truncate":
            segments.losses["truncated"] += int(long.sum())
            most = pair_limit(max_length, both.min(axis=1))
            stop = np.minimum(lengths, np.repeat(np.where(long, most, max_length), 2))
        else:
            segments.dropped[TOO_LONG] += int(long.sum())
        # The first token of a document is never a target.
        trained = before[starts + stop] - before[np.minimum(starts + 1, starts + stop)]
        learned = (trained > 0).reshape(-1, 2).all(axis=1)
        considered = ~long | (too_long == "truncate")
        segments.dropped[NO_TARGET] += int((considered & ~learned).sum())
        kept = np.flatnonzero(np.repeat(considered & learned, 2))
        columns = (kept + segments.documents, (skipped + stop)[kept], trained[kept])
        segments.append(columns if max_prompt is None else (*columns, skipped[kept]))
    return segments.cut(each=2)


def _prompts(before: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64[documents]: tokens before the first trained one; 0 where none is trained."""
    first = np.searchsorted(before, before[offsets[:-1]], side="right") - 1  # as many are trained before it
    return np.where(before[offsets[1:]] > before[offsets[:-1]], first - offsets[:-1], 0)


def in_order(batches: Iterator[pa.RecordBatch], max_length: int, carried: CutSoFar = _NOTHING) -> Segments:
    """Cut documents, end to end in their order, wherever a row is full: the segments of every full row.

    Left out are what comes after the last one, which is carried on, and rows without a trained target. DataError as for
    `cut`.
    """
    columns = _Columns(4, carried.documents)
    seen = 0
    if carried.row:
        columns.append(carried.row)
        seen = int((carried.row[1] - carried.row[3]).sum())
    for before, offsets in columns.read(batches):
        lengths = np.diff(offsets)
        phase = (seen + np.cumsum(lengths) - lengths) % max_length
        pieces = -(-(phase + lengths) // max_length)
        number, document = ranges(0, pieces), np.repeat(np.arange(len(lengths)), pieces)
        start = np.maximum(number * max_length - phase[document], 0)
        stop = np.minimum((number + 1) * max_length - phase[document], lengths[document])
        trained = before[offsets[document] + stop] - before[np.minimum(offsets[document] + start + 1, offsets[-1])]
        columns.append((document + columns.documents, stop, trained, start))
        columns.losses["split"] += int((pieces > 1).sum())
        seen += int(lengths.sum())
    documents, stops, targeted, starts = columns.done()
    after = np.cumsum(stops - starts, dtype=np.int64)
    row = (after - 1) // max_length
    learned = np.bincount(row, weights=targeted) > 0
    learned[seen // max_length :] = False
    kept = learned[row]
    bounds = np.append(0, np.flatnonzero(after[kept] % max_length == 0) + 1)
    begun = tuple(column[row == seen // max_length] for column in (documents, stops, targeted, starts))
    documents, stops, targeted, starts = (column[kept] for column in (documents, stops, targeted, starts))
    carried = CutSoFar(columns.documents, begun)
    return Segments(documents, starts, stops, targeted, losses=columns.losses, rows=bounds, carried=carried)


def pair_limit(max_length: int, shorter: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64[pairs]: the most tokens of either document of pairs, so that both together have at most `max_length`.

    The longer one is cut first, to what the `shorter` one leaves but at least to half a row; then both are cut to that.
    """
    return np.maximum(max_length - shorter, max_length // 2)


def row_batches(
    segments: Segments, max_length: int, packing: bool, limits: tuple[int, int] = (BATCH_ROWS, BATCH_SEGMENTS),
    sources: Sequence[int] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield the packed rows in record batches of at most `limits` rows and segments (but of a row at least).

    Where `sources` say how many documents each source has, in order, no row holds those of two.
    """
    packs = packing and segments.rows is None
    order, offsets = _packed(segments, max_length, sources) if packs else _alone(segments)
    max_rows, max_segments = limits
    first, n_rows = 0, len(offsets) - 1
    while first < n_rows:
        fitting = int(np.searchsorted(offsets, offsets[first] + max_segments, side="right")) - 1
        last = min(max(fitting, first + 1), first + max_rows, n_rows)
        yield _record_batch(segments, order[offsets[first] : offsets[last]], offsets[first : last + 1])
        first = last


Order = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def _packed(segments: Segments, max_length: int, sources: Sequence[int]) -> tuple[Order, npt.NDArray[np.int64]]:
    """Segments in the order of rows, and where each row begins: neighbours that belong together are one item."""
    each = segments.each
    lengths = segments.tokens if each == 1 else segments.tokens.reshape(-1, each).sum(axis=1, dtype=np.uint32)
    bounds = np.searchsorted(segments.document, [0, *np.cumsum(sources)]) // each if sources else [0, len(lengths)]
    packed = [(first, *pack(lengths[first:last], max_length)) for first, last in pairwise(bounds)]
    items, offsets = packed[0][1:]
    if sources:
        items = np.concatenate([first + order for first, order, _ in packed])
        offsets = np.concatenate([[0], *(first + starts[1:] for first, _, starts in packed)])
    if each == 1:
        return items, offsets
    order = items.astype(np.int64)[:, None] * each + np.arange(each)
    return order.reshape(-1), offsets * each


def _alone(segments: Segments) -> tuple[Order, npt.NDArray[np.int64]]:
    """The rows that are decided, else one for each segment, or for those that belong together."""
    count = len(segments.document)
    rows = np.arange(0, count + 1, segments.each, dtype=np.int64) if segments.rows is None else segments.rows
    return np.arange(count, dtype=np.int32), rows


def _record_batch(segments: Segments, chosen: Order, offsets: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Rows of the `chosen` segments; row i holds those from `offsets[i]` to `offsets[i + 1]`, less the first offset."""
    starts = offsets[:-1] - offsets[0]
    bounds = arrow((offsets - offsets[0]).astype(np.int32))

    def column(values: U32) -> pa.Array:
        return pa.ListArray.from_arrays(bounds, arrow(values[chosen]))

    def sums(values: npt.NDArray[Any], dtype: type[np.unsignedinteger[Any]]) -> pa.Array:
        return arrow(np.add.reduceat(values, starts, dtype=np.uint64).astype(dtype))

    tokens = segments.stop[chosen] - segments.start[chosen]
    return pa.record_batch(
        [
            column(segments.document), column(segments.start), column(segments.stop), sums(tokens, np.uint32),
            sums(segments.trained[chosen], np.uint32), sums(tokens.astype(np.uint64) ** 2, np.uint64),
        ],
        schema=ROWS_SCHEMA,
    )


class _Columns:
    """Columns that grow in place: not a piece for each record batch, which would leave the heap in holes."""

    def __init__(self, count: int, documents: int) -> None:
        self._columns = [np.empty(0, dtype=np.uint32) for _ in range(count)]
        self._length = 0
        self.documents = documents
        """Those of the blocks before, and of the record batches that were read."""
        self.dropped, self.losses = Counter[str](), Counter[str]()

    def read(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """What :func:`_trained_before` says of each record batch. Raises DataError for 2^32 documents or more."""
        for batch in batches:
            yield _trained_before(batch)
            self.documents += batch.num_rows
            if self.documents > MAX_DOCUMENTS:
                raise DataError(f"more than {MAX_DOCUMENTS:,} documents in one split")

    def append(self, values: tuple[npt.NDArray[np.integer], ...]) -> None:
        stop = self._length + len(values[0])
        for column, part in zip(self._columns, values, strict=True):
            if stop > len(column):
                column.resize(max(stop, len(column) + len(column) // 4), refcheck=False)
            column[self._length : stop] = part
        self._length = stop

    def done(self) -> list[U32]:
        for column in self._columns:
            column.resize(self._length, refcheck=False)
        return self._columns

    def cut(self, each: int = 1) -> Segments:
        """The columns as segments, from the beginning of their documents where no start is among them."""
        documents, stops, trained, *rest = self.done()
        starts = rest[0] if rest else np.broadcast_to(np.uint32(0), len(stops))
        return Segments(
            documents, starts, stops, trained, +self.dropped, self.losses, each=each, carried=CutSoFar(self.documents)
        )


def _trained_before(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """int32[tokens + 1]: how many tokens of a record batch are trained before each; int64: where documents begin."""
    column = batch.column("trained")
    offsets = view(column.offsets).astype(np.int64)
    return offsets_of(Flags(column.values).read(offsets[0], offsets[-1]), np.int32), offsets - offsets[0]
