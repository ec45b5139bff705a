"""Prepared data on disk, opened: memory-mapped documents, packed rows and held-out samples.

A prepared directory holds `<split>.documents.arrow` (one document per record: `input_ids`, `trained`,
`prompt_tokens`, and where answers are compared `margin` or `label`; the two answers of a pair are neighbours),
`<split>.rows.arrow` (one row per record: segments `document`, `start`, `stop` and the sums `tokens`, `trained`,
`squares`), where they were packed in several blocks `<split>.counts.i64` (four counts of each row), where answers have
labels `<split>.partners.arrow` (of each document another one, whose prompt is another), `samples.jsonl` and
`manifest.json`. The Arrow files are IPC streams. Of large documents in an object store the token ids are fetched as
they are read, in blocks (:mod:`tuner.stores.blocks`).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonlines
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.errors import DataError
from tuner.runtime.files import read_json, verify_entries

if TYPE_CHECKING:
    from tuner.stores.blocks import BlockFile

PREPARED_SCHEMA = "tuner.prepared/3"
"""The `schema` of a prepared directory's manifest."""
WAY_TO_NAME = "leave out --prepared, or give it the directory that tuner prepare-data RECIPE prints"
ROWS_SCHEMA = pa.schema(
    [(name, pa.list_(pa.uint32())) for name in ("document", "start", "stop")]
    + [("tokens", pa.uint32()), ("trained", pa.uint32()), ("squares", pa.uint64())]
)
"""The columns of `<split>.rows.arrow`: a row's segments, their lengths summed, its targets, squared lengths summed."""

COUNTS = ("tokens", "trained", "squares", "documents")
"""What `<split>.counts.i64` has of each row, in little-endian int64: as in its record, and its segments."""
PARTNERS_SCHEMA = pa.schema([("partner", pa.uint32())])
"""The column of `<split>.partners.arrow`: of each document another one of the split."""


@dataclass(frozen=True)
class Row:
    """One packed row of T tokens holding one or more document segments."""

    input_ids: npt.NDArray[np.int64]
    """int64[T]"""
    trained: npt.NDArray[np.bool_]
    """bool[T]: whether the token itself is to be learned (when it is not the first of its segment)."""
    lengths: npt.NDArray[np.int32]
    """int32[segments]; their sum is T."""
    documents: npt.NDArray[np.int64]
    """int64[segments]: the document of each segment, by its number in the split."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[segments] each: what is known of each document besides its tokens, such as what a reference model gives it."""
    of_trained: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[trained targets, ...] each, in their order: what is known of each, such as a teacher's most probable tokens."""


_Tokens = tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]
"""Token ids in their file's unsigned type, and whether each is trained."""


class PreparedSample(NamedTuple):
    """A held-out prompt with the answer that the data gives."""

    prompt_ids: list[int]
    prompt_text: str
    reference: str


class PreparedDocuments:
    """Encoded documents of one Arrow stream, memory-mapped; a document is read without copying the others."""

    def __init__(self, path: Path) -> None:
        table = open_stream(path)
        types = {field.name: field.type for field in table.schema}
        ids, flags = types.get("input_ids"), types.get("trained")
        if ids not in (pa.list_(pa.uint16()), pa.list_(pa.uint32())) or flags != pa.list_(pa.bool_()):
            raise DataError(f"{path}: not documents: {table.schema.to_string(show_schema_metadata=False)}")
        self._path = path
        self._ids = _list_blocks(table.column("input_ids"))
        self._trained = [(view(chunk.offsets), Flags(chunk.values)) for chunk in table.column("trained").chunks]
        self._starts = _starts(table.column("input_ids"))
        self._table = table
        self.blocks = _blocks_of(path)
        """What fetches token ids; None where all are here."""
        self._places = [] if self.blocks is None else [start for start, _ in id_spans(path)]

    def __len__(self) -> int:
        return self._starts[-1]

    def length(self, document: int) -> int:
        """Tokens of a document."""
        block, i = _place(self._starts, document)
        offsets = self._ids[block][0]
        return int(offsets[i + 1]) - int(offsets[i])

    def span(self, document: int, start: int, stop: int) -> tuple[int, int]:
        """Where the ids of tokens [start, stop) lie in a file that is fetched in blocks, in bytes."""
        block, i = _place(self._starts, document)
        offsets, ids = self._ids[block]
        first = self._places[block] + int(offsets[i]) * ids.itemsize
        return first + start * ids.itemsize, first + stop * ids.itemsize

    @cached_property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """int64[documents]: tokens before the answer; 0 where there is none."""
        return _numbers(self._table.column("prompt_tokens"), np.int64)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """What is known of each document besides its tokens, [documents] each.

        A pair without a margin has one of 0 where others have one, and there is no such column where none has.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        if "label" in self._table.schema.names:
            flags = [Flags(chunk).read(0, len(chunk)) for chunk in self._table.column("label").chunks]
            found["label"] = np.concatenate([np.empty(0, dtype=np.bool_), *flags])
        if "margin" in self._table.schema.names:
            values = _numbers(self._table.column("margin"), np.float32)
            unknown = np.isnan(values)
            if not unknown.all():
                found["margin"] = np.where(unknown, np.float32(0), values)
        return found

    def read(self, document: int, start: int, stop: int) -> _Tokens:
        """Return token ids (the file's unsigned type) and trained flags of tokens [start, stop) of one document.

        Raises DataError where the document has not as many token ids and flags.
        """
        block, i = _place(self._starts, document)
        (id_offsets, ids), (flag_offsets, flags) = self._ids[block], self._trained[block]
        first, first_flag = int(id_offsets[i]), int(flag_offsets[i])
        if stop > min(int(id_offsets[i + 1]) - first, int(flag_offsets[i + 1]) - first_flag):
            raise DataError(f"{self._path}: document {document} has not the {stop} token ids and flags asked for")
        if self.blocks is not None and self.blocks.missing:
            self.blocks.need([self.span(document, start, stop)])
        return ids[first + start : first + stop], flags.read(first_flag + start, first_flag + stop)


@dataclass(eq=False)
class PackedRows:
    """The packed rows of one split, read on demand from memory-mapped files.

    Opening reads the headers of the record batches alone. The counts of all rows are gathered when first asked for, or
    mapped where there is a file of them.
    """

    documents: PreparedDocuments
    table: pa.Table
    max_length: int
    """The most tokens that a row holds."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[documents of the split] each: what is known of each document besides its tokens."""
    of_trained: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[trained targets of all rows, ...] each: what is known of each of them, row after row."""
    mapped: npt.NDArray[np.int64] | None = None
    """int64[rows, COUNTS]"""

    def __post_init__(self) -> None:
        self._segments = [_list_blocks(self.table.column(name)) for name in ("document", "start", "stop")]
        self._starts = _starts(self.table.column("document"))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def is_large(self) -> bool:
        """Whether the rows are too many to be held in any form: counts are mapped, and an epoch's order is computed."""
        return self.mapped is not None

    def with_columns(self, columns: Mapping[str, npt.NDArray[Any]]) -> "PackedRows":
        """The same rows with more columns, each ``[documents of the split]``. Raises ValueError for another length."""
        _require_length(columns, len(self.documents), "documents")
        return replace(self, columns={**self.columns, **columns})

    def with_trained(self, columns: Mapping[str, npt.NDArray[Any]]) -> "PackedRows":
        """The same rows with columns of trained targets, each ``[trained targets of all rows, ...]``, row after row.

        They may be mapped files: a row reads its own part. Raises ValueError for another length.
        """
        _require_length(columns, int(self._first_trained[-1]), "trained tokens")
        return replace(self, of_trained={**self.of_trained, **columns})

    @property
    def document_numbers(self) -> npt.NDArray[np.int64]:
        """int64[segments of all rows]: the document of each segment, row after row."""
        numbers = [values[offsets[0] : offsets[-1]] for offsets, values in self._segments[0]]
        return np.concatenate([np.empty(0, dtype=np.int64), *numbers], dtype=np.int64, casting="unsafe")

    @cached_property
    def tokens_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: tokens of each row."""
        return self._counts("tokens")

    @cached_property
    def trained_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: trained targets of each row; the first token of a segment is never one."""
        return self._counts("trained")

    @cached_property
    def documents_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: segments of each row: its documents, and pieces of documents."""
        if self.mapped is not None:
            return self._counts("documents")
        counts = [np.diff(offsets) for offsets, _ in self._segments[0]]
        return np.concatenate([np.empty(0, dtype=np.int64), *counts], dtype=np.int64)

    @cached_property
    def squares_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: the squared lengths of each row's segments, summed: what attention costs."""
        return self._counts("squares")

    def fetch(self, row_ids: Iterable[int]) -> None:
        """Begin to fetch what of these rows is still in an object store alone, in their order, without waiting."""
        if self.documents.blocks is not None and self.documents.blocks.missing:
            segments = (segment for i in row_ids for segment in self._segments_of(i))
            spans = (self.documents.span(document, start, stop) for document, start, stop in segments)
            self.documents.blocks.need(spans, wait=False)

    def _segments_of(self, i: int) -> list[tuple[int, int, int]]:
        """Document, start and stop of each segment of row i."""
        block, at = _place(self._starts, i)
        offsets = self._segments[0][block][0]
        first, last = int(offsets[at]), int(offsets[at + 1])
        return list(zip(*(blocks[block][1][first:last].tolist() for blocks in self._segments), strict=True))

    def row(self, i: int) -> Row:
        """Return row i, copied out of the files."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        segments = self._segments_of(i)
        numbers = np.array([document for document, _, _ in segments], dtype=np.int64)
        columns = {name: values[numbers] for name, values in self.columns.items()}
        row = _row([self.documents.read(*segment) for segment in segments], numbers, columns)
        if not self.of_trained:
            return row
        first, last = int(self._first_trained[i]), int(self._first_trained[i + 1])
        return replace(row, of_trained={name: np.array(values[first:last]) for name, values in self.of_trained.items()})

    @cached_property
    def _first_trained(self) -> npt.NDArray[np.int64]:
        """int64[rows + 1]: the trained targets before each row."""
        return np.concatenate([[0], np.cumsum(self.trained_per_row)])

    def mismatched(self, row: Row) -> Row:
        """Return the documents of a row of labelled answers, each with its partner's answer in the place of its own.

        A document is its prompt with what follows the prompt of its partner, cut to `max_length` tokens; numbers and
        columns are the row's. Raises DataError where the data has no labels.
        """
        partners = row.columns.get("partner")
        if partners is None:
            raise DataError("answers without labels have no partners", hint="prepare the data for a method of labels")
        prompts = self.documents.prompt_tokens
        parts: list[_Tokens] = []
        for own, other in zip(row.documents.tolist(), partners.tolist(), strict=True):
            count = int(prompts[own])
            ids, trained = self.documents.read(own, 0, count)
            stop = min(self.documents.length(other), int(prompts[other]) + self.max_length - count)
            answer, learned = self.documents.read(other, int(prompts[other]), stop)
            parts.append((np.concatenate([ids, answer]), np.concatenate([trained, learned])))
        return _row(parts, row.documents, row.columns)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))

    def _counts(self, name: str) -> npt.NDArray[np.int64]:
        if self.mapped is not None:
            return self.mapped[:, COUNTS.index(name)]
        return _numbers(self.table.column(name), np.int64)


def _row(parts: Sequence[_Tokens], documents: npt.NDArray[np.int64], columns: Mapping[str, npt.NDArray[Any]]) -> Row:
    """The row of these segments, one after the other."""
    ids, trained = zip(*parts, strict=True)
    lengths = np.array([len(part) for part in ids], dtype=np.int32)
    return Row(np.concatenate(ids, dtype=np.int64), np.concatenate(trained), lengths, documents, columns)


@dataclass(frozen=True)
class PreparedData:
    """An opened prepared directory."""

    path: Path
    key: str
    manifest: Mapping[str, Any]
    train: PackedRows
    eval: PackedRows | None
    samples: list[PreparedSample]
    eval_documents: tuple[int, ...] = ()
    """Held-out documents of each source, in the order of the recipe; those of one source lie together."""


def open_prepared(path: Path, verify: bool = False) -> PreparedData:
    """Open a prepared directory; file sizes are always checked, SHA-256 sums with `verify`.

    Raises DataError where it is missing, damaged, or not a prepared directory of this version.
    """
    path = Path(path)
    if not (path / "manifest.json").is_file():
        raise DataError(f"{path}: not a prepared data directory", hint=WAY_TO_NAME)
    manifest = read_json(path / "manifest.json")
    if manifest.get("schema") != PREPARED_SCHEMA:
        raise DataError(f"{path}: not prepared data of this version (schema {manifest.get('schema')!r})")
    try:
        key, max_length = str(manifest["key"]), int(manifest["max_length"])
        eval_documents = tuple(int(count) for count in manifest["eval_documents"])
        verify_entries(path, manifest["files"], hash=False)
        verify_entries(path, hashed_files(path, manifest["files"]) if verify else {}, hash=True)
        has_eval = "eval.rows.arrow" in manifest["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path / 'manifest.json'}: {error!r} in the manifest") from error
    train = _open_rows(path, "train", max_length, manifest["files"])
    held_out = _open_rows(path, "eval", max_length, manifest["files"]) if has_eval else None
    return PreparedData(path, key, manifest, train, held_out, _read_samples(path / "samples.jsonl"), eval_documents)


def open_stream(path: Path) -> pa.Table:
    """Map an Arrow IPC stream file into memory; raises DataError naming the file."""
    try:
        with pa.memory_map(str(path), "r") as source:
            return pa.ipc.open_stream(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Arrow stream: {error}") from error


def record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow IPC stream file, one at a time in memory."""
    # Read and not mapped: the pages of a mapped file count as this process's memory until the system wants them back.
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def id_spans(documents: Path) -> list[tuple[int, int]]:
    """Where the token ids of each record batch lie in a file of documents: bytes [start, stop)."""
    with pa.memory_map(str(documents), "r") as source:
        base = source.read_buffer(1).address
        source.seek(0)
        ids = pa.ipc.open_stream(source).read_all().column("input_ids")
    buffers = [chunk.values.buffers()[1] for chunk in ids.chunks]
    return [(buffer.address - base, buffer.address - base + buffer.size) for buffer in buffers]


def hashed_files(path: Path, files: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a manifest's files those that are whole: one that is fetched in blocks proves each block when it is read."""
    return {name: facts for name, facts in files.items() if not (path / f"{name}.blocks").is_file()}


def _blocks_of(documents: Path) -> "BlockFile | None":
    """What fetches the ids of documents that came from a store without them."""
    if hashed_files(documents.parent, {documents.name: None}):
        return None
    from tuner.stores.blocks import BlockFile  # others do without

    return BlockFile(documents)


def row_counts(rows: Path) -> Path:
    """The file with the counts of a file's rows."""
    return rows.with_name(rows.name.replace(".rows.arrow", ".counts.i64"))


def _require_length(columns: Mapping[str, npt.NDArray[Any]], length: int, what: str) -> None:
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(f"the column {name} has {len(values):,} values for {length:,} {what}")


def _open_rows(path: Path, split: str, max_length: int, files: Mapping[str, Any]) -> PackedRows:
    documents = PreparedDocuments(path / f"{split}.documents.arrow")
    rows = open_stream(path / f"{split}.rows.arrow")
    if not rows.schema.equals(ROWS_SCHEMA):
        raise DataError(f"{path / f'{split}.rows.arrow'}: not packed rows: {rows.schema.to_string()}")
    columns = documents.columns()
    if "label" in columns:
        partners = open_stream(path / f"{split}.partners.arrow")
        if not partners.schema.equals(PARTNERS_SCHEMA) or partners.num_rows != len(documents):
            raise DataError(f"{path / f'{split}.partners.arrow'}: not the partners of these documents")
        columns["partner"] = _numbers(partners.column("partner"), np.int64)
    counted, shape = row_counts(path / f"{split}.rows.arrow"), (rows.num_rows, len(COUNTS))
    counts = np.asarray(np.memmap(counted, "<i8", "r", shape=shape)) if counted.name in files else None
    return PackedRows(documents, rows, max_length, columns, mapped=counts)


def view(array: pa.Array) -> npt.NDArray[Any]:
    """A numpy view of an array of numbers without nulls. (`to_numpy` would import pandas: 40 MB and 0.2 s.)"""
    return np.from_dlpack(array)


def _numbers(column: pa.ChunkedArray, dtype: type[np.number[Any]]) -> npt.NDArray[Any]:
    """A column of numbers without nulls, copied as numbers of this type."""
    chunks = [view(chunk) for chunk in column.chunks]
    return np.concatenate([np.empty(0, dtype=dtype), *chunks], dtype=dtype, casting="unsafe")


def arrow(values: npt.NDArray[Any]) -> pa.Array:
    """An Arrow array of a contiguous numpy array of numbers, in its memory. (`pa.array` would import pandas.)"""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def arrow_bits(values: npt.NDArray[np.bool_]) -> pa.BooleanArray:
    """An Arrow array of booleans, a bit each, of exactly its size."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


class Flags:
    """A boolean array without nulls, of which any part is read without the rest; its bits stay where they are."""

    def __init__(self, array: pa.BooleanArray) -> None:
        bits = array.buffers()[1]
        self.offset: int = array.offset
        """The bit at which the array begins."""
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(bits if bits is not None else b"", dtype=np.uint8)

    def read(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Flags [start, stop), copied."""
        first, last = self.offset + start, self.offset + stop
        bits = np.unpackbits(self.bytes[first >> 3 : (last + 7) >> 3], bitorder="little")
        return bits[first & 7 : (first & 7) + stop - start].view(np.bool_)


def _list_blocks(column: pa.ChunkedArray) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]:
    """(offsets, values) of each record batch of a list column, both views of the file."""
    return [(view(chunk.offsets), view(chunk.values)) for chunk in column.chunks]


def _starts(column: pa.ChunkedArray) -> list[int]:
    """The index of each record batch's first record, and the number of all."""
    return [0, *accumulate(len(chunk) for chunk in column.chunks)]


def _place(starts: list[int], i: int) -> tuple[int, int]:
    """Record i's batch, and its index in there."""
    block = bisect_right(starts, i) - 1
    return block, i - starts[block]


def _read_samples(path: Path) -> list[PreparedSample]:
    try:
        with jsonlines.open(path) as reader:
            return [
                PreparedSample([int(i) for i in line["prompt_ids"]], str(line["prompt_text"]), str(line["reference"]))
                for line in reader
            ]
    except (OSError, KeyError, TypeError, ValueError, jsonlines.InvalidLineError) as error:
        raise DataError(f"{path}: not a readable sample file: {error}") from error
