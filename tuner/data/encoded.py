"""The first level of prepared data: encoded documents, independent of row length and packing."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jsonlines
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.config.duration import Duration
from tuner.data.encode import Encoder
from tuner.data.place import Document
from tuner.data.problems import RowProblem
from tuner.data.rows import parse_row
from tuner.data.sources import RawRow, SourceFile, read_rows
from tuner.errors import DataError

BATCH_ROWS = 512
BATCH_CHARS = 4 << 20
"""Rows are encoded together up to either bound: memory does not grow with the input."""
REJECTS = "rejects.jsonl"
NO_TRAINED_TOKEN = "no trained token"
_SHOWN_CHARS = 10_000


@dataclass
class SplitCounts:
    """What became of one split's rows."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    digests: list[bytes] = field(default_factory=list)
    """16 bytes for each document: its token ids' hash."""

    @property
    def duplicates(self) -> int:
        """Documents that equal an earlier one."""
        return len(self.digests) - len(set(self.digests))

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "rows": self.rows,
            "documents": self.documents,
            "tokens": self.tokens,
            "trained": self.trained,
            "longest": self.longest,
            "duplicates": self.duplicates,
            "skipped": dict(sorted(self.skipped.items())),
            "dropped": dict(sorted(self.dropped.items())),
        }

    def add(self, document: Document) -> None:
        """Count a document that is kept."""
        self.documents += 1
        self.tokens += len(document.input_ids)
        self.trained += int(document.trained[1:].sum())
        self.longest = max(self.longest, len(document.input_ids))
        self.digests.append(_digest(document.input_ids))


class DocumentWriter:
    """Writes documents to an Arrow IPC stream file, in record batches."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._id_type = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self.schema = pa.schema(
            [
                ("input_ids", pa.list_(pa.from_numpy_dtype(self._id_type))),
                ("trained", pa.list_(pa.bool_())),
                ("prompt_tokens", pa.uint32()),
            ]
        )
        self._file = path.open("wb")
        self._writer = pa.ipc.new_stream(self._file, self.schema)

    def write(self, documents: Sequence[Document]) -> None:
        """Append one record batch."""
        if not documents:
            return
        offsets = np.concatenate([[0], np.cumsum([len(document.input_ids) for document in documents])])
        bounds = pa.array(offsets.astype(np.int32))
        ids = np.concatenate([document.input_ids for document in documents]).astype(self._id_type)
        trained = np.concatenate([document.trained for document in documents])
        prompts = pa.array([document.prompt_tokens for document in documents], pa.uint32())
        lists = [pa.ListArray.from_arrays(bounds, pa.array(values)) for values in (ids, trained)]
        self._writer.write_batch(pa.record_batch([*lists, prompts], schema=self.schema))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append a record batch of the same schema."""
        if batch.num_rows:
            self._writer.write_batch(batch)

    def __enter__(self) -> "DocumentWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._file.close()


def encode_files(
    files: Sequence[SourceFile], path: Path, encoder: Encoder, vocab_size: int, on_bad_row: str
) -> SplitCounts:
    """Encode every row of `files` to `path`; bad rows are an error or go to `rejects.jsonl` beside it. DataError."""
    counts = SplitCounts()
    with DocumentWriter(path, vocab_size) as writer, jsonlines.open(path.parent / REJECTS, "a") as rejects:
        for file in files:
            for rows in _batches(read_rows(file)):
                kept = []
                for row, document in zip(rows, encode_rows(rows, encoder, file.format), strict=True):
                    counts.rows += 1
                    if isinstance(document, RowProblem):
                        if on_bad_row == "error":
                            raise row_error(row, document)
                        counts.skipped[document.reason] += 1
                        line, col = row.place(document)
                        rejects.write(
                            {"file": str(row.path), "line": line, "col": col, "reason": document.reason,
                             "row": row.text[:_SHOWN_CHARS]}
                        )  # fmt: skip
                    elif not document.trained[1:].any():
                        counts.dropped[NO_TRAINED_TOKEN] += 1
                    else:
                        counts.add(document)
                        kept.append(document)
                writer.write(kept)
    return counts


def encode_rows(rows: Sequence[RawRow], encoder: Encoder, format: str) -> list[Document | RowProblem]:  # noqa: A002
    """Parse and encode raw rows, in order; a bad one gives its problem."""
    results: list[Document | RowProblem] = []
    for row in rows:
        try:
            if row.value is None:
                raise row.problem or RowProblem("not readable", 1)
            results.append(encoder.explain(parse_row(row.value, format)))
        except RowProblem as problem:
            results.append(problem)
    return results


def row_error(row: RawRow, problem: RowProblem) -> DataError:
    """The error for a bad row, with its place."""
    line, col = row.place(problem)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem.path).lstrip(".")
    return DataError(
        f"{row.path}:{line}:{col}: {where + ': ' if where else ''}{problem.reason}",
        hint="mend the row, or set data.on_bad_row: skip",
    )


def choose_eval(digests: Sequence[bytes], split: Duration, seed: int) -> npt.NDArray[np.bool_]:
    """Return bool[documents]: those held out. Equal documents go together, so none is on both sides. DataError."""
    total = len(digests)
    wanted = math.floor(total * split.count / 100 + 0.5) if split.unit == "%" else int(split.count)
    wanted = max(wanted, 1)
    if wanted >= total:
        raise DataError(
            f"data.eval: {split} of {total:,} documents leaves none to train on",
            hint="give data.eval a file of its own",
        )
    groups: dict[bytes, list[int]] = {}
    for i, digest in enumerate(digests):
        groups.setdefault(digest, []).append(i)
    key = seed.to_bytes(8, "little")
    held_out = np.zeros(total, dtype=np.bool_)
    for digest in sorted(groups, key=lambda d: hashlib.blake2b(d, digest_size=16, key=key).digest()):
        if len(groups[digest]) <= wanted:
            held_out[groups[digest]] = True
            wanted -= len(groups[digest])
        if wanted == 0:
            break
    if not held_out.any():
        raise DataError("data.eval: the documents repeat too often to hold any out", hint="give data.eval a file")
    return held_out


def split_file(source: Path, held_out: npt.NDArray[np.bool_], vocab_size: int) -> None:
    """Stream `source` into train.arrow and eval.arrow beside it."""
    start = 0
    with (
        DocumentWriter(source.parent / "train.arrow", vocab_size) as train,
        DocumentWriter(source.parent / "eval.arrow", vocab_size) as held,
    ):
        for batch in record_batches(source):
            mask = held_out[start : start + batch.num_rows]
            start += batch.num_rows
            train.write_batch(batch.filter(pa.array(~mask)))
            held.write_batch(batch.filter(pa.array(mask)))


def record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow IPC stream file, memory-mapped."""
    with pa.memory_map(str(path), "r") as source:
        yield from pa.ipc.open_stream(source)


def counts_of(path: Path) -> SplitCounts:
    """Count the documents of an encoded file."""
    counts = SplitCounts()
    for batch in record_batches(path):
        offsets = batch.column("input_ids").offsets.to_numpy().astype(np.int64)
        ids = batch.column("input_ids").values.to_numpy().astype(np.int64)
        trained = batch.column("trained").values.to_numpy(zero_copy_only=False)
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
            counts.add(Document(ids[start:stop], trained[start:stop], 0, []))
    counts.rows = counts.documents
    return counts


def _batches(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    batch: list[RawRow] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += len(row.text)
        if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def first_rows(files: Sequence[SourceFile], count: int) -> Iterator[tuple[RawRow, SourceFile]]:
    """Yield the first rows of the files, in order."""
    return islice(((row, file) for file in files for row in read_rows(file)), count)


def _digest(ids: npt.NDArray[np.int64]) -> bytes:
    return hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=16).digest()
