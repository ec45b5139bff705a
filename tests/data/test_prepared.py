
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.data.reading.files import write_stream
from tuner.data import prepared
from tuner.data.building.pack import cut, row_batches
from tuner.data.prepared import Flags, PackedRows, PreparedDocuments, arrow, open_prepared, open_stream, view
from tuner.errors import DataError
from tuner.runtime.files import file_entries

DOCUMENTS = [[i * 100 + j for j in range(1 + i % 7)] for i in range(40)]
MAX_LENGTH = 8


def flags(document: list[int]) -> list[bool]:
    return [token % 3 != 1 for token in document]


def document_batch(documents: list[list[int]], masks: list[list[bool]] | None = None) -> pa.RecordBatch:
    ids = pa.array(documents, pa.list_(pa.uint16()))
    trained = pa.array(masks or [flags(document) for document in documents], pa.list_(pa.bool_()))
    return pa.record_batch([ids, trained], names=["input_ids", "trained"])


def write_prepared(directory: Path, limits: tuple[int, int]) -> Path:
    """A prepared directory of DOCUMENTS, in record batches of seven documents and of at most `limits` rows."""
    directory.mkdir()
    # Sliced, so that offsets do not begin at 0.
    whole = document_batch(DOCUMENTS)
    batches = [whole.slice(start, 7) for start in range(0, len(DOCUMENTS), 7)]
    write_stream(directory / "train.documents.arrow", pa.Table.from_batches(batches))
    rows = row_batches(cut(iter(batches), MAX_LENGTH, "split"), 8, True, limits)
    write_stream(directory / "train.rows.arrow", pa.Table.from_batches(rows))
    (directory / "samples.jsonl").touch()
    files = file_entries(directory)
    facts = {"schema": prepared.PREPARED_SCHEMA, "key": directory.name, "max_length": MAX_LENGTH, "eval_documents": []}
    manifest = facts | {"files": files}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def contents(rows: PackedRows) -> list[tuple[list[int], list[bool], list[int]]]:
    return [(row.input_ids.tolist(), row.trained.tolist(), row.lengths.tolist()) for row in rows]


@pytest.mark.parametrize("limits", [(1 << 16, 1 << 22), (3, 5), (1, 1)])
def test_rows_hold_their_documents_whatever_the_record_batches(tmp_path: Path, limits: tuple[int, int]) -> None:
    data = open_prepared(write_prepared(tmp_path / "p", limits), verify=True)
    rows = data.train
    n_batches = len(open_stream(tmp_path / "p" / "train.rows.arrow").to_batches())
    assert (n_batches > 3) == (limits[0] < 4)
    found = []
    for i, row in enumerate(rows):
        assert row.input_ids.dtype == np.int64
        ends = np.cumsum(row.lengths)
        for start, stop in zip(ends - row.lengths, ends, strict=True):
            found.append(row.input_ids[start:stop].tolist())
            assert row.trained[start:stop].tolist() == flags(found[-1])
        targets = row.trained.copy()
        targets[ends - row.lengths] = False
        assert rows.tokens_per_row[i] == len(row.input_ids) <= rows.max_length
        assert rows.trained_per_row[i] == targets.sum() > 0
        assert rows.documents_per_row[i] == len(row.lengths)
        assert rows.squares_per_row[i] == (row.lengths.astype(np.int64) ** 2).sum()
    assert sorted(found) == sorted(document for document in DOCUMENTS if any(flags(document)[1:]))
    whole = open_prepared(write_prepared(tmp_path / "whole", (1 << 16, 1 << 22))).train
    assert contents(rows) == contents(whole)


@pytest.mark.parametrize("i", [-1, 1000])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, i: int) -> None:
    rows = open_prepared(write_prepared(tmp_path / "p", (4, 8))).train
    with pytest.raises(IndexError, match=f"row {i} of "):
        rows.row(i)


def test_opening_copies_no_column(tmp_path: Path) -> None:
    directory = write_prepared(tmp_path / "p", (4, 8))
    before = pa.total_allocated_bytes()
    data = open_prepared(directory)
    data.train.row(0)
    assert pa.total_allocated_bytes() == before
    views = [*data.train._segments[0], *data.train.documents._ids]
    for offsets, values in views:
        assert not offsets.flags.owndata
        assert not values.flags.owndata


def test_documents_are_read_from_sliced_batches(tmp_path: Path) -> None:
    write_prepared(tmp_path / "p", (4, 8))
    documents = PreparedDocuments(tmp_path / "p" / "train.documents.arrow")
    assert len(documents) == len(DOCUMENTS)
    for i, document in enumerate(DOCUMENTS):
        for start in range(len(document)):
            ids, trained = documents.read(i, start, len(document))
            assert ids.tolist() == document[start:]
            assert trained.tolist() == flags(document)[start:]


def test_documents_whose_mask_is_shorter_are_refused_when_read(tmp_path: Path) -> None:
    batch = document_batch([[1, 2], [3, 4, 5]], [[True, True], [True, True]])
    documents = PreparedDocuments(write_stream(tmp_path / "d.arrow", pa.table(batch)))
    assert documents.read(0, 0, 2)[0].tolist() == [1, 2]
    with pytest.raises(DataError, match="document 1 has not the 3 token ids and flags"):
        documents.read(1, 0, 3)


@pytest.mark.parametrize("name", ["train.documents.arrow", "train.rows.arrow"])
def test_a_file_with_other_columns_is_named(tmp_path: Path, name: str) -> None:
    directory = write_prepared(tmp_path / "p", (4, 8))
    write_stream(directory / name, pa.table({"other": [1]}))
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").unlink()
    manifest["files"] = file_entries(directory)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=f"{name}: not "):
        open_prepared(directory)


@pytest.mark.parametrize("first", [0, 1, 8, 13])
def test_any_part_of_flags_is_read(first: int) -> None:
    values = [i % 3 == 0 or i % 7 == 2 for i in range(40)]
    flags = Flags(pa.array(values).slice(first))
    for start in range(len(values) - first):
        for stop in range(start, len(values) - first + 1):
            assert flags.read(start, stop).tolist() == values[first + start : first + stop]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint64])
def test_arrays_are_shared_with_arrow(dtype: type) -> None:
    values = np.arange(5, dtype=dtype)
    array = arrow(values)
    assert (array.type, array.to_pylist()) == (pa.from_numpy_dtype(dtype), [0, 1, 2, 3, 4])
    values[1] = 9
    assert view(array.slice(1)).tolist() == [9, 2, 3, 4]
