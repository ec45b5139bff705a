"""Records encoded: what a worker does with some blocks of them, and the batch and counts that it answers with."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.config.methods import Examples
from tuner.data.building.pack import NO_TRAINED_TOKEN, REPEATS
from tuner.data.building.repetition import Repetition, repeating
from tuner.data.encoding.encode import CHECKS, AnyEncoder, Encoder
from tuner.data.encoding.place import EncodedBatch
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.turns import SpecialTokens
from tuner.data.prepared import arrow, arrow_bits
from tuner.data.ranges import offsets_of
from tuner.data.reading.blocks import Block, RawRecord, examples_of, lines_in, position_of
from tuner.data.reading.examples import NULLS, Learned, answers_of, has_null
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import form_read
from tuner.runtime.memory import give_back

Bundle = tuple[Block, ...]
"""Blocks that are encoded together: one large one, or consecutive small ones."""
MASKED = "documents that repeat a pattern keep their place in a row, and nothing of them is trained"
SLICE_RECORDS, SLICE_BYTES = 8192, 1 << 20
"""Records of a bundle that are encoded at a time: Python's objects and 64-bit positions take many times their bytes."""
SLICE_CHECKS = 1
"""Records of each slice that are placed alone and compared, where there are several slices."""
REJECT_BYTES = 10_000
"""A longer record is cut in `rejects.jsonl`."""
TABLE = np.dtype([("digest", "<u8", 2), ("length", "<u4"), ("targets", "<u4"), ("follows", "?")])
"""What is kept of a document, 25 bytes: 128 bits of its token ids' hash, its tokens, those of them that are trained but
for its first one, and whether it is of the same record as the one before. Of a pair of documents it is one entry: the
hash of both hashes, and the sums."""


_Found = tuple[int, RawRecord, Learned | RecordProblem]
"""A record after its block, by its place in the bundle, and with its example or why it has none."""


class BadRecord(NamedTuple):
    """A record that cannot be used."""

    line: int
    """From 1 in its block."""
    col: int
    where: str
    """The value's place in the record, such as `messages[1].content`; may be empty."""
    reason: str
    record: str
    hint: str | None = None
    """The line to write in the recipe where one, apart from the source's, would make the record usable."""
    value: Mapping[str, Any] | None = None
    """The record, for what may be proposed: of the first one of a bundle that is no example."""


class _AddedCounts:
    """Counts that are added up field by field."""

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """All of them together."""
        total = cls()
        for each in counts:
            total.add(each)
        return total

    def add(self, other: Self) -> None:
        """Count what `other` counted too."""
        for one in fields(self):  # type: ignore[arg-type]  # of dataclasses only
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass
class Counts(_AddedCounts):
    """What became of records: of one block, one source or one split."""

    records: int = 0
    documents: int = 0
    """Those that are kept; two that are one example count as one."""
    skipped: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    """Records of each form."""
    wanted: int = 0
    """Of labelled answers, documents whose answer is wanted."""


@dataclass
class Tally(_AddedCounts):
    """What is said of the documents of a bundle or a split."""

    fast: int = 0
    escaped: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    chats: int = 0
    """Conversations of which each answer is a document of its own, since no one text of them has exact masks."""
    answers: int = 0
    """Documents of these."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> answers of these conversations that have no document."""


class EncodedBlock(NamedTuple):
    """What became of one block's records; its documents follow those of the block before in the bundle's batch."""

    counts: Counts
    bad: list[BadRecord]
    lines: int
    """Lines of the block: what follows it in its file counts on from there."""


class EncodedBundle(NamedTuple):
    """The n kept documents of a bundle, in order."""

    documents: pa.Buffer | None
    """Their record batch as a stream file holds it; None where there is none."""
    table: npt.NDArray[np.void]
    """TABLE[n]"""
    blocks: list[EncodedBlock]
    tally: Tally


@dataclass(frozen=True)
class EncodeJob:
    """What decides how records are encoded; a worker gets it once. A `pool.Job`."""

    tokenizer: TextTokenizer
    examples: Examples
    special_tokens: SpecialTokens
    stop_at_bad_row: bool
    """Whether nothing after a bad record of a bundle is wanted."""
    fast: bool = True
    much: bool = False
    """Whether there is enough for the fast encoder: it is then built at the start, for all processes at once."""
    repetition: Repetition | None = None
    """Which repetition is too much for a document to be kept."""

    def start(self) -> Callable[[Bundle], EncodedBundle]:
        """Build the encoder; what is returned raises FastEncoderMismatch and DataError."""
        give_back()  # reading a tokenizer leaves a hundred megabytes of holes, which nothing that follows would fill
        encoder = Encoder(self.tokenizer, self.examples.train_on, self.special_tokens, self.fast)
        if self.much:
            encoder.choose()
        give_back()
        schema = documents_schema(self.tokenizer.vocab_size, self.examples)
        return lambda bundle: _encode(bundle, AnyEncoder(encoder, self.examples.kind), schema, self)


_COLUMNS = {"preference": [("margin", pa.float32())], "unpaired": [("label", pa.bool_())]}
"""What is known of a document besides its tokens: by how much the chosen answer of its pair is preferred, not a number
where that is not known; whether its answer is wanted."""


def documents_schema(vocab_size: int, examples: Examples) -> pa.Schema:
    """The columns of a file of documents; token ids in the narrowest unsigned type."""
    ids = pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()
    columns = [("input_ids", pa.list_(ids)), ("trained", pa.list_(pa.bool_())), ("prompt_tokens", pa.uint32())]
    return pa.schema([*columns, *_COLUMNS.get(examples.kind, [])])


def targets_of(trained: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return int64[documents]: trained tokens of each, without its first one, which is predicted from nothing."""
    before: npt.NDArray[np.int32] = offsets_of(trained, np.int32)
    return np.subtract(before[offsets[1:]], before[np.minimum(offsets[:-1] + 1, offsets[1:])], dtype=np.int64)


def digest(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return uint64[documents, 2]: 128 bits of the hash of each of the documents that lie one after another.

    `ids` are uint32[tokens], `offsets` int64[documents + 1].
    """
    words = np.ascontiguousarray(ids, dtype="<u4").data.cast("B")
    bounds: Sequence[int] = (offsets * 4).tolist()
    hashes = b"".join(
        hashlib.blake2b(words[start:stop], digest_size=16).digest()
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    )
    return np.frombuffer(hashes, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def _encode(bundle: Bundle, encoder: AnyEncoder, schema: pa.Schema, job: EncodeJob) -> EncodedBundle:
    """The kept documents of a bundle."""
    gathered = _KeptDocuments(bundle, schema, job.examples.documents, job.repetition)
    checks = CHECKS if gathered.size <= SLICE_BYTES else SLICE_CHECKS
    for part in _slices(bundle, job):
        examples = [example for *_, example in part if not isinstance(example, RecordProblem)]
        gathered.add(part, encoder.encode(examples, gathered.size, checks))
        if job.stop_at_bad_row and any(gathered.bad):
            break
    return gathered.done()


def _slices(bundle: Bundle, job: EncodeJob) -> Iterator[list[_Found]]:
    """Read blocks and yield their records, at least one slice; nothing after a bad record at which the job stops."""
    part: list[_Found] = []
    size = 0
    for owner, block in enumerate(bundle):
        for record, example in examples_of(block, job.examples.kind):
            part.append((owner, record, example))
            size += len(record.raw)
            if job.stop_at_bad_row and isinstance(example, RecordProblem):
                yield part
                return
            if len(part) >= SLICE_RECORDS or size >= SLICE_BYTES:
                yield part
                part, size = [], 0
    yield part


class _KeptDocuments:
    """The kept documents of a bundle, as flat arrays that grow slice by slice, and what became of its records."""

    def __init__(self, bundle: Bundle, schema: pa.Schema, each: int, repetition: Repetition | None) -> None:
        self._bundle = bundle
        self._schema = schema
        self._each = each
        """Documents of an example: they are kept together or not at all."""
        self.size = sum(block.size for block in bundle)
        """Bytes of all records."""
        self._columns: list[tuple[npt.NDArray[Any], ...]] = []
        self._counts = [Counts() for _ in bundle]
        self.bad: list[list[tuple[int, int, BadRecord]]] = [[] for _ in bundle]
        """Of each block, with the place where the record begins."""
        self._tally = Tally()
        self._repetition = repetition
        self._is_cut = np.array([block.file.array is not None and block.file.array.is_whole for block in bundle])
        self._is_array = np.array([block.file.array is not None for block in bundle])
        self._is_unread = False
        """Whether a record could not be read: the first such one goes along."""

    def add(self, part: list[_Found], batch: EncodedBatch) -> None:
        """Keep what is needed of a slice, of which `batch` are the documents of those that have an example."""
        read = [(owner, record) for owner, record, example in part if not isinstance(example, RecordProblem)]
        owners = np.array([owner for owner, _ in read], dtype=np.int64)
        repeats = np.zeros(len(batch.records), dtype=np.bool_)
        if self._repetition is not None and len(repeats):
            found = repeating(batch.input_ids, batch.offsets, self._repetition).reshape(-1, self._each)
            repeats = np.repeat(found.any(axis=1), self._each)
            batch = replace(batch, trained=batch.trained & ~np.repeat(repeats, np.diff(batch.offsets)))
        targets = targets_of(batch.trained, batch.offsets)
        kept = np.repeat((targets > 0).reshape(-1, self._each).all(axis=1), self._each)
        if any(self._is_array):  # a lone id there has its place in a row
            kept |= self._is_array[owners[batch.records]] & (~repeats | self._is_cut[owners[batch.records]])
        wanted = kept & batch.columns.get("label", np.zeros_like(kept)).astype(np.bool_)
        dropped = {REPEATS: repeats & ~kept, NO_TRAINED_TOKEN: ~repeats & ~kept}
        self._count(owners, batch.records, kept, wanted, dropped)
        files = [block.file for block in self._bundle]
        for owner, record, example in part:
            if not isinstance(example, RecordProblem):
                file = files[owner]
                self._counts[owner].forms[form_read(record.value or {}, example, file.format, file.columns)] += 1
            else:
                self._counts[owner].records += 1
                self._refuse(owner, record, example, None if self._is_unread else record.value)
                self._is_unread = True
        for i, problem in batch.problems.items():
            owner, record = read[i]
            self._refuse(owner, record, problem)
        self._columns.append(self._kept(batch, targets, kept))
        answers = int(np.isin(batch.records[kept], list(batch.by_answer)).sum()) if batch.by_answer else 0
        left_out = Counter(reason for reasons in batch.by_answer.values() for reason in reasons)
        notes = batch.notes + _nulls(part) + Counter({MASKED: int((repeats & kept).sum())})
        self._tally.add(Tally(batch.fast, batch.escaped, notes, len(batch.by_answer), answers, left_out))

    def done(self) -> EncodedBundle:
        """All of them."""
        table, *columns = (
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*self._columns, strict=True)
        )
        self._columns.clear()
        documents = _record_batch(columns, self._schema).serialize() if len(table) else None
        bad = ([one for *_, one in sorted(found, key=lambda one: one[:2])] for found in self.bad)
        each = zip(self._counts, bad, map(lines_in, self._bundle), strict=True)
        blocks = [EncodedBlock(counts, records, count) for counts, records, count in each]
        return EncodedBundle(documents, table, blocks, self._tally)

    def _count(
        self, owners: npt.NDArray[np.int64], records: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_],
        wanted: npt.NDArray[np.bool_], dropped: Mapping[str, npt.NDArray[np.bool_]],
    ) -> None:
        """Count the records of a slice, and its documents, which come from `records`, by block."""
        size = len(self._bundle)
        read = np.bincount(owners, minlength=size)
        documents, liked = (np.bincount(owners[records[which]], minlength=size) for which in (kept, wanted))
        lost = {reason: np.bincount(owners[records[which]], minlength=size) for reason, which in dropped.items()}
        for number in np.flatnonzero(read).tolist():
            counts = self._counts[number]
            counts.records += int(read[number])
            counts.documents += int(documents[number]) // self._each
            counts.wanted += int(liked[number])
            counts.dropped += Counter({reason: int(many[number]) // self._each for reason, many in lost.items()})

    def _refuse(
        self, owner: int, record: RawRecord, problem: RecordProblem, value: Mapping[str, Any] | None = None
    ) -> None:
        self._counts[owner].skipped[problem.kind] += 1
        self.bad[owner].append((record.line, record.col, bad_record(record, problem, value)))

    def _kept(
        self, batch: EncodedBatch, targets: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[Any], ...]:
        """The table of what is kept, and of its documents the ids, flags, lengths, prompts and columns."""
        batch = batch.only(kept)
        lengths = np.diff(batch.offsets)
        table = np.empty(len(lengths) // self._each, dtype=TABLE)
        table["digest"] = _together(digest(batch.input_ids, batch.offsets), self._each)
        table["length"], table["targets"] = (of.reshape(-1, self._each).sum(axis=1) for of in (lengths, targets[kept]))
        table["follows"] = np.diff(batch.records[:: self._each], prepend=-1) == 0
        is_narrow = self._schema.field("input_ids").type.value_type == pa.uint16()
        ids = batch.input_ids.astype(np.uint16 if is_narrow else np.uint32, copy=False)
        own = [batch.columns[name] for name in self._schema.names[3:]]
        return table, ids, batch.trained, lengths.astype(np.uint32), batch.prompt_tokens, *own


def _nulls(part: list[_Found]) -> Counter[str]:
    """The note on nulls that are trained as they are written."""
    usable = [(record.raw, example) for _, record, example in part if not isinstance(example, RecordProblem)]
    return Counter({NULLS: sum(b"null" in raw and has_null(answers_of(example)) for raw, example in usable)})


def _together(digests: npt.NDArray[np.uint64], each: int) -> npt.NDArray[np.uint64]:
    """uint64[examples, 2]: the digests of examples of so many documents, from those of the documents."""
    if each == 1:
        return digests
    bounds = np.arange(0, 4 * len(digests) + 1, 4 * each)
    return digest(digests.astype("<u8").view("<u4").reshape(-1), bounds)


def _record_batch(columns: Sequence[npt.NDArray[Any]], schema: pa.Schema) -> pa.RecordBatch:
    # Every buffer is made here, of exactly its size: the file's bytes then depend on nothing but the values.
    ids, trained, lengths, *others = columns
    bounds = arrow(offsets_of(lengths).astype(np.int32))
    lists = [pa.ListArray.from_arrays(bounds, values) for values in (arrow(ids), arrow_bits(trained))]
    plain = [arrow_bits(values) if values.dtype == np.bool_ else arrow(values) for values in others]
    return pa.record_batch([*lists, *plain], schema=schema)


def bad_record(record: RawRecord, problem: RecordProblem, value: Mapping[str, Any] | None = None) -> BadRecord:
    """Return what is said of a record that cannot be used; `value` is the record where it is no example."""
    line, col = position_of(record, problem)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem.path).lstrip(".")
    shown = record.raw[:REJECT_BYTES].decode("utf-8", "replace")
    return BadRecord(line, col, where, problem.reason, shown, problem.hint, value)
