"""The files of a split's packed rows, written block by block: the memory of one block, however many there are."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tuner.data.building.encoded import record_batches
from tuner.data.building.pack import LOSSES, CutSoFar, Segments, in_blocks, row_batches
from tuner.data.prepared import COUNTS, ROWS_SCHEMA, row_counts, view


class CutsBlock(Protocol):
    """What cuts a block of documents: `cut` or `in_order` of :mod:`tuner.data.building.pack`, for rows of one kind."""

    def __call__(self, batches: Iterator[pa.RecordBatch], *, carried: CutSoFar) -> Segments:
        """Cut one block, which comes after what was carried."""


def segments_of(batches: Iterator[pa.RecordBatch], max_length: int, cuts: CutsBlock) -> Iterator[Segments]:
    """Yield the segments of documents, a block at a time; the one before is held until the next is cut."""
    carried = CutSoFar()
    for block in in_blocks(batches, max_length):
        found = cuts(block, carried=carried)
        carried = found.carried
        yield found


def write_rows(
    path: Path, blocks: Iterator[Segments], max_length: int, packing: bool = True, sources: Sequence[int] = ()
) -> dict[str, Any]:
    """Write `<split>.rows.arrow`, and of several blocks the counts of all rows next to it; return the report of both.

    `sources` are as in :func:`~tuner.data.building.pack.row_batches`. OSError where it cannot be written.
    """
    sums, dropped = Counter[str](), Counter[str]()
    n_blocks = documents = each = 0
    last = -1
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, ROWS_SCHEMA) as writer:
        for segments in blocks:
            rows = 0
            for batch in row_batches(segments, max_length, packing, sources=sources):
                writer.write_batch(batch)
                rows += batch.num_rows
            numbers, each = segments.document, segments.each
            if len(numbers):
                documents += int(np.count_nonzero(np.diff(numbers))) + (int(numbers[0]) != last)
                last = int(numbers[-1])
            tokens, trained = (int(column.sum(dtype=np.int64)) for column in (segments.tokens, segments.trained))
            sums.update(rows=rows, tokens=tokens, trained=trained)
            sums.update(segments.losses)
            dropped.update(segments.dropped)
            n_blocks += 1
    if n_blocks > 1:
        _write_counts(path)
    return {
        "packed_rows": sums["rows"],
        "packed_documents": documents // each if sums["rows"] else 0,
        "packed_tokens": sums["tokens"],
        "packed_trained": sums["trained"],
        "fill": round(sums["tokens"] / (sums["rows"] * max_length), 6) if sums["rows"] else 0.0,
        "dropped_rows": dict(dropped),
        **{name: sums[name] for name in LOSSES if name != "cut_prompts" or sums[name]},
        **({"blocks": n_blocks} if n_blocks > 1 else {}),
    }


def _write_counts(rows: Path) -> None:
    """The counts of rows that nobody holds in memory: they are mapped, and shared by the processes of a machine."""
    with row_counts(rows).open("xb") as file:
        for batch in record_batches(rows):
            segments = np.diff(view(batch.column("document").offsets))
            columns = [segments if name == "documents" else view(batch.column(name)) for name in COUNTS]
            np.stack(columns, axis=1, dtype="<i8", casting="unsafe").tofile(file)
