"""Prepared data on disk, opened: memory-mapped documents, packed rows and held-out samples.

A prepared directory holds `<split>.documents.arrow` (one document per record: `input_ids`, `trained`,
`prompt_tokens`), `<split>.rows.arrow` (one row per record: segments `document`, `start`, `stop` and the counts
`tokens`, `trained`), `samples.jsonl` and `manifest.json`. The Arrow files are IPC streams.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuner.errors import DataError
from tuner.runtime.files import read_json, verify_entries

PREPARED_SCHEMA = "tuner.prepared/1"
"""The `schema` of a prepared directory's manifest."""


@dataclass(frozen=True)
class Row:
    """One packed row of T tokens holding one or more document segments."""

    input_ids: npt.NDArray[np.int64]
    """int64[T]"""
    trained: npt.NDArray[np.bool_]
    """bool[T]: whether the token itself is to be learned (when it is not the first of its segment)."""
    lengths: npt.NDArray[np.int32]
    """int32[segments]; their sum is T."""


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with the answer that the data gives."""

    prompt_ids: list[int]
    prompt_text: str
    reference: str


class Documents:
    """Encoded documents of one Arrow stream, memory-mapped; a document is read without copying the others."""

    def __init__(self, path: Path) -> None:
        table = open_stream(path)
        self._ids: list[npt.NDArray[Any]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._trained: list[pa.Array] = []
        starts = [0]
        for batch in table.to_batches():
            ids, trained = batch.column("input_ids"), batch.column("trained")
            offsets = ids.offsets.to_numpy().astype(np.int64)
            trained_offsets = trained.offsets.to_numpy().astype(np.int64)
            if not np.array_equal(offsets - offsets[0], trained_offsets - trained_offsets[0]):
                raise DataError(f"{path}: token ids and masks differ in length")
            self._ids.append(ids.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy())
            self._trained.append(trained.values.slice(trained_offsets[0], offsets[-1] - offsets[0]))
            self._offsets.append(offsets - offsets[0])
            starts.append(starts[-1] + batch.num_rows)
        self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, document: int, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return token ids (the file's unsigned type) and trained flags of tokens [start, stop) of one document."""
        block = int(np.searchsorted(self._starts, document, side="right")) - 1
        base = int(self._offsets[block][document - int(self._starts[block])])
        ids = self._ids[block][base + start : base + stop]
        return ids, self._trained[block].slice(base + start, stop - start).to_numpy(zero_copy_only=False)


class PackedRows:
    """The packed rows of one split, read on demand from memory-mapped files."""

    def __init__(self, documents: Documents, rows: pa.Table, max_length: int) -> None:
        self._documents = documents
        self._max_length = max_length
        self._tokens: npt.NDArray[np.int64] = _column(rows, "tokens")
        self._trained: npt.NDArray[np.int64] = _column(rows, "trained")
        segments = [rows.column(name).combine_chunks() for name in ("document", "start", "stop")]
        self._segments = [
            (column.values.to_numpy() if len(column) else np.empty(0, dtype=np.uint32)) for column in segments
        ]
        self._offsets = segments[0].offsets.to_numpy() if len(rows) else np.zeros(1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def max_length(self) -> int:
        """The most tokens that a row holds."""
        return self._max_length

    @property
    def tokens_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: tokens of each row."""
        return self._tokens

    @property
    def trained_per_row(self) -> npt.NDArray[np.int64]:
        """int64[rows]: trained targets of each row; the first token of a segment is never one."""
        return self._trained

    def row(self, i: int) -> Row:
        """Return row i, copied out of the files."""
        first, last = int(self._offsets[i]), int(self._offsets[i + 1])
        document, start, stop = (column[first:last].tolist() for column in self._segments)
        parts = [self._documents.read(*segment) for segment in zip(document, start, stop, strict=True)]
        return Row(
            input_ids=np.concatenate([ids for ids, _ in parts]).astype(np.int64),
            trained=np.concatenate([trained for _, trained in parts]),
            lengths=np.array([len(ids) for ids, _ in parts], dtype=np.int32),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self.row(i) for i in range(len(self)))


@dataclass(frozen=True)
class PreparedData:
    """An opened prepared directory."""

    path: Path
    key: str
    manifest: Mapping[str, Any]
    train: PackedRows
    eval: PackedRows | None
    samples: list[Sample]


def open_prepared(path: Path, verify: bool = False) -> PreparedData:
    """Open a prepared directory; file sizes are always checked, SHA-256 sums with `verify`.

    Raises DataError where it is missing, damaged, or not a prepared directory of this version.
    """
    path = Path(path)
    if not (path / "manifest.json").is_file():
        raise DataError(f"{path}: not a prepared data directory", hint="run: tuner prepare-data RECIPE")
    manifest = read_json(path / "manifest.json")
    if manifest.get("schema") != PREPARED_SCHEMA:
        raise DataError(f"{path}: not prepared data of this version (schema {manifest.get('schema')!r})")
    try:
        key, max_length = str(manifest["key"]), int(manifest["max_length"])
        verify_entries(path, manifest["files"], hash=verify)
        has_eval = "eval.rows.arrow" in manifest["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path / 'manifest.json'}: {error!r} in the manifest") from error
    return PreparedData(
        path=path,
        key=key,
        manifest=manifest,
        train=_open_rows(path, "train", max_length),
        eval=_open_rows(path, "eval", max_length) if has_eval else None,
        samples=_read_samples(path / "samples.jsonl"),
    )


def open_stream(path: Path) -> pa.Table:
    """Map an Arrow IPC stream file into memory; raises DataError naming the file."""
    try:
        with pa.memory_map(str(path), "r") as source:
            return pa.ipc.open_stream(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Arrow stream: {error}") from error


def _open_rows(path: Path, split: str, max_length: int) -> PackedRows:
    documents = Documents(path / f"{split}.documents.arrow")
    return PackedRows(documents, open_stream(path / f"{split}.rows.arrow"), max_length)


def _column(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)


def _read_samples(path: Path) -> list[Sample]:
    try:
        with jsonlines.open(path) as reader:
            return [
                Sample([int(i) for i in line["prompt_ids"]], str(line["prompt_text"]), str(line["reference"]))
                for line in reader
            ]
    except (OSError, KeyError, TypeError, ValueError, jsonlines.InvalidLineError) as error:
        raise DataError(f"{path}: not a readable sample file: {error}") from error
