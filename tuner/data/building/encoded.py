"""Rows encoded: what a worker does with some blocks of them, and the record batch and counts that it answers with."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.data.building.selection import Digests, digest
from tuner.data.building.stream_file import Place, write_batch
from tuner.data.encoding.encode import EncodedBatch, Encoder
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.turns import SpecialTokens, TrainOn
from tuner.data.prepared import arrow, arrow_bits
from tuner.data.reading.blocks import Block, RawRow, lines_in, place, rows_of
from tuner.data.reading.problems import RowProblem
from tuner.data.reading.rows import Example, parse_row

Bundle = tuple[Block, ...]
"""Blocks that are encoded together: one large one, or consecutive small ones."""
NO_TRAINED_TOKEN = "no trained token"
REJECT_BYTES = 10_000
"""A longer row is cut in `rejects.jsonl`."""


class BadRow(NamedTuple):
    """A row that cannot be used."""

    line: int
    """From 1 in its block."""
    col: int
    where: str
    """The value's place in the row, such as `messages[1].content`; may be empty."""
    reason: str
    row: str


@dataclass
class Counts:
    """What became of rows: of one block, one source or one split."""

    rows: int = 0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        """Count what `other` counted too."""
        self.rows += other.rows
        self.documents += other.documents
        self.skipped.update(other.skipped)
        self.dropped.update(other.dropped)


@dataclass(frozen=True)
class EncodedBlock:
    """What became of one block's rows; its documents follow those of the block before in the bundle's batch."""

    counts: Counts
    bad: list[BadRow]
    lines: int
    """Lines of the block: what follows it in its file counts on from there."""


@dataclass(frozen=True)
class EncodedBundle:
    """The n kept documents of a bundle, in order, but for their tokens: those stay with who encoded them."""

    size: int
    """Bytes of their record batch in a file; 0 where there is none."""
    digests: Digests
    """uint64[n, 2]"""
    lengths: npt.NDArray[np.uint32]
    """uint32[n]: tokens"""
    targets: npt.NDArray[np.uint32]
    """uint32[n]: trained tokens, the first of a document never being one"""
    blocks: list[EncodedBlock]
    fast: int
    escaped: int
    notes: Counter[str]


@dataclass(frozen=True)
class EncodeJob:
    """What decides how rows are encoded; a worker gets it once. A `workers.Job`."""

    tokenizer: TextTokenizer
    train_on: TrainOn
    special_tokens: SpecialTokens
    vocab_size: int
    stop_at_bad_row: bool
    """Whether nothing after a bad row of a bundle is wanted."""
    fast: bool = True

    def start(self) -> "Encoding":
        """Build the encoder."""
        encoder = Encoder(self.tokenizer, self.train_on, self.special_tokens, self.fast)
        return Encoding(encoder, documents_schema(self.vocab_size), self.stop_at_bad_row)


class Encoding:
    """Encodes bundles, and writes each one's documents when it is told where. A `workers.Work`."""

    def __init__(self, encoder: Encoder, schema: pa.Schema, stop: bool) -> None:
        self._encoder = encoder
        self._schema = schema
        self._stop = stop
        self._unwritten: dict[int, pa.Buffer] = {}

    def answer(self, number: int, bundle: Bundle) -> EncodedBundle:
        """Encode a bundle; raises FastEncoderMismatch and DataError."""
        encoded, documents = _encode(bundle, self._encoder, self._schema, self._stop)
        if documents is not None:
            self._unwritten[number] = documents
        return encoded

    def finish(self, number: int, place: Place) -> None:
        """Write a bundle's record batch. OSError."""
        write_batch(place, self._unwritten.pop(number))


class _Found(NamedTuple):
    """Rows of one block: those with an example, in order, and the bad ones."""

    rows: list[RawRow]
    bad: list[tuple[RawRow, RowProblem]]


def documents_schema(vocab_size: int) -> pa.Schema:
    """The columns of a file of documents; token ids in the narrowest unsigned type."""
    ids = pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()
    return pa.schema([("input_ids", pa.list_(ids)), ("trained", pa.list_(pa.bool_())), ("prompt_tokens", pa.uint32())])


def record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow IPC stream file, one at a time in memory."""
    # Read and not mapped: the pages of a mapped file count as this process's memory until the system wants them back.
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def targets_of(trained: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return int64[documents]: trained tokens of each, without its first one, which is predicted from nothing."""
    before = np.zeros(len(trained) + 1, dtype=np.int64)
    np.cumsum(trained, out=before[1:])
    return before[offsets[1:]] - before[np.minimum(offsets[:-1] + 1, offsets[1:])]


def _encode(
    bundle: Bundle, encoder: Encoder, schema: pa.Schema, stop: bool
) -> tuple[EncodedBundle, pa.Buffer | None]:
    examples: list[Example] = []
    found: list[_Found] = []
    for block in bundle:
        found.append(_parsed(block, examples, stop))
        if stop and found[-1].bad:
            break
    batch = encoder.encode(examples)
    targets = targets_of(batch.trained, batch.offsets)
    kept = targets > 0
    blocks, start = [], 0
    for block, own in zip(bundle, found, strict=False):
        stop_at = start + len(own.rows)
        documents = slice(*np.searchsorted(batch.rows, (start, stop_at)).tolist())
        bad = own.bad + [
            (own.rows[i - start], batch.problems[i]) for i in sorted(batch.problems) if start <= i < stop_at
        ]
        blocks.append(_encoded_block(block, own, bad, kept[documents]))
        start = stop_at
    return _bundle(batch, schema, kept, targets, blocks)


def _parsed(block: Block, examples: list[Example], stop: bool) -> _Found:
    """Read a block and append its examples; with `stop`, nothing after the first bad row."""
    rows: list[RawRow] = []
    bad: list[tuple[RawRow, RowProblem]] = []
    form, columns = block.file.format, dict(block.file.columns)
    for row in rows_of(block):
        problem = row.problem
        if row.value is not None:
            try:
                examples.append(parse_row(row.value, form, columns))
                rows.append(row)
            except RowProblem as found:
                problem = found
        if problem is not None:
            bad.append((row, problem))
            if stop:
                break
    return _Found(rows, bad)


def _encoded_block(
    block: Block, found: _Found, bad: Sequence[tuple[RawRow, RowProblem]], kept: npt.NDArray[np.bool_]
) -> EncodedBlock:
    counts = Counts(rows=len(found.rows) + len(found.bad), documents=int(kept.sum()))
    counts.skipped.update(problem.kind for _, problem in bad)
    if not kept.all():
        counts.dropped[NO_TRAINED_TOKEN] = int((~kept).sum())
    ordered = sorted(bad, key=lambda pair: (pair[0].line, pair[0].col))
    return EncodedBlock(counts, [bad_row(row, problem) for row, problem in ordered], lines_in(block))


def _bundle(
    batch: EncodedBatch,
    schema: pa.Schema,
    kept: npt.NDArray[np.bool_],
    targets: npt.NDArray[np.int64],
    blocks: list[EncodedBlock],
) -> tuple[EncodedBundle, pa.Buffer | None]:
    """The tables of an encoded batch's kept documents, and the documents as a file holds them, where there are any."""
    ids, trained, offsets = batch.input_ids, batch.trained, batch.offsets
    lengths = np.diff(offsets)
    if not kept.all():
        tokens = np.repeat(kept, lengths)
        ids, trained, lengths = ids[tokens], trained[tokens], lengths[kept]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = None
    if len(lengths):
        documents = _record_batch(ids, trained, offsets, batch.prompt_tokens[kept], schema).serialize()
    bundle = EncodedBundle(
        size=0 if documents is None else documents.size,
        digests=digest(ids, offsets),
        lengths=lengths.astype(np.uint32),
        targets=targets[kept].astype(np.uint32),
        blocks=blocks,
        fast=batch.fast,
        escaped=batch.escaped,
        notes=batch.notes,
    )
    return bundle, documents


def _record_batch(
    ids: npt.NDArray[np.uint32],
    trained: npt.NDArray[np.bool_],
    offsets: npt.NDArray[np.int64],
    prompts: npt.NDArray[np.uint32],
    schema: pa.Schema,
) -> pa.RecordBatch:
    # Every buffer is made here, of exactly its size: the file's bytes then depend on nothing but the values.
    bounds = arrow(offsets.astype(np.int32))
    is_narrow = schema.field("input_ids").type.value_type == pa.uint16()
    narrow = ids.astype(np.uint16 if is_narrow else np.uint32, copy=False)
    lists = [pa.ListArray.from_arrays(bounds, values) for values in (arrow(narrow), arrow_bits(trained))]
    return pa.record_batch([*lists, arrow(prompts.astype(np.uint32))], schema=schema)


def bad_row(row: RawRow, problem: RowProblem) -> BadRow:
    """Return what is said of a row that cannot be used."""
    line, col = place(row, problem)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem.path).lstrip(".")
    return BadRow(line, col, where, problem.reason, row.raw[:REJECT_BYTES].decode("utf-8", "replace"))
