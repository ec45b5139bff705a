"""Arrays of token ids cut into blocks of records: documents, or what rows hold of documents.

A file is looked through in its mapped memory, a part at a time; a block names the places of its records, and whoever
reads it takes no other ids. Where rows are cut, a record ends wherever a document or a row does, and the records of a
file fill whole rows, end to end.
"""

from collections.abc import Iterator

import numpy as np
import orjson

from tuner.data.id_arrays import IdArray, Ints
from tuner.data.reading.block import BLOCK_BYTES, Block, RawRecord
from tuner.data.sources import INDEX, SourceFile
from tuner.errors import DataError

MOST_IDS = 1 << 26
"""A longer document is none: its end is another id."""


def id_blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a file between two records. DataError where no document ends for too long."""
    assert file.array is not None
    width = np.dtype(file.array.dtype).itemsize
    start = index = 0
    for found in _record_ends(file, file.array, max(BLOCK_BYTES // width, 1)):
        if len(found):
            ends = np.concatenate([[start], found])
            yield Block(file, index, start * width, int(found[-1]) * width, lines=len(found), ends=ends.tobytes())
            start, index = int(found[-1]), index + 1


def id_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block, each with where its first id stands in the file."""
    array = block.file.array
    assert array is not None
    ids, ends = array.mapped(block.file.path), np.frombuffer(block.ends, dtype=np.int64)
    places = ends[:-1] - (ends[:-1] // array.row * array.overlap if array.row else 0)
    for line, (place, count) in enumerate(zip(places.tolist(), np.diff(ends).tolist(), strict=True), start=1):
        values = np.ascontiguousarray(ids[place : place + count], dtype=np.int64)
        raw = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
        yield RawRecord(line, raw, {"input_ids": values, "place": array.before + place}, None, 0)


def _record_ends(file: SourceFile, array: IdArray, step: int) -> Iterator[Ints]:
    """The ends of records, part by part: in ids of the file, or where rows are cut in ids of its rows end to end."""
    ids, row, overlap = array.mapped(file.path), array.row or 0, array.overlap
    rows = (array.count - overlap) // (row - overlap) if row and array.is_whole else 0
    total = rows * (row - overlap) + overlap * (rows > 0) if array.is_whole else array.count
    known = array.document_ends(file.path.with_suffix(INDEX)) if array.is_indexed else None
    last = 0
    for at in range(0, total, step):
        stop = min(at + step, total)
        if known is not None:
            found = known[np.searchsorted(known, at, "right") : np.searchsorted(known, stop, "right")]
        else:
            found = np.flatnonzero(ids[at:stop] == array.end) + at + 1 if array.end is not None else ids[:0]
        if row:
            first, final = (max(place + overlap * ((place - 1) // (row - overlap)), 0) for place in (at, stop))
            full = np.arange(first // row + 1, final // row + 1) * row
            found = np.union1d(found + overlap * ((found.astype(np.int64) - 1) // (row - overlap)), full)
        if stop == total:
            most = rows * row if array.is_whole else total
            found = np.union1d(found[found < most], [most])
        last = int(found[-1]) if len(found) else last
        if stop - last > MOST_IDS:
            none = f"no document ends in {MOST_IDS:,} ids from position {last:,} on"
            raise DataError(f"{file.name}: {none}: end_id names the id that ends documents, null where none does")
        yield found.astype(np.int64)
