"""Arrays of token ids: rows as the loaders of OLMo-core and Megatron cut them, whose definitions are written out."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import tiny
from tests.fixtures.tables import cases
from tuner.data.building import pack
from tuner.data.building.documents import explain
from tuner.data.building.prepare import prepare
from tuner.data.prepared import open_prepared
from tuner.data.reading import id_blocks
from tuner.errors import DataError

EOS = 2  # of the tiny tokenizer
Row = tuple[list[int], list[int]]
"""Ids, and the lengths of the documents that they are of."""


def drawn(count: int, seed: int = 0, often: float = 0.15) -> np.ndarray[Any, Any]:
    """Ids with an end token now and then, some next to each other."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < often, EOS, rng.integers(3, 300, count))


def write_index(path: Path, sequences: Sequence[np.ndarray[Any, Any]], documents: Sequence[int], code: int = 8) -> Path:
    """Megatron's pair of files: ids end to end, and the header, lengths, byte offsets and bounds of documents."""
    ids = np.concatenate(sequences).astype({8: "<u2", 4: "<i4"}[code])
    path.write_bytes(ids.tobytes())
    lengths = np.array([len(each) for each in sequences], dtype="<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * ids.itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    bounds = np.array(documents, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.astype("<i8").tobytes() + bounds)
    return path


def rows_of(cache: Path, train: object, **data: Any) -> list[Row]:
    spec = tiny.request(cache, train, pretrain=True, **{"rows": "cut", "max_length": 16, **data})
    prepared = open_prepared(prepare(spec).path, verify=True)
    return [(row.input_ids.tolist(), row.lengths.tolist()) for row in prepared.train]


def parted(ids: np.ndarray[Any, Any], ends: Sequence[int]) -> Row:
    """A row by the positions in it after which another document begins."""
    return ids.tolist(), np.diff([0, *(end for end in ends if 0 < end < len(ids)), len(ids)]).tolist()


def olmo_rows(files: Sequence[np.ndarray[Any, Any]], length: int) -> list[Row]:
    """OLMo-core's fixed sequence length: of each file whole instances, whose documents are ended by the end token."""
    every = [ids[i * length : (i + 1) * length] for ids in files for i in range(len(ids) // length)]
    rows = [parted(ids, (np.flatnonzero(ids == EOS) + 1).tolist()) for ids in every]
    return [row for row in rows if max(row[1]) > 1]  # a row of end tokens has nothing to learn


def megatron_rows(ids: np.ndarray[Any, Any], ends: Sequence[int], length: int) -> list[Row]:
    """Megatron's samples of sequence_length + 1 ids, here `length`: each begins with the last id of the one before."""
    step = length - 1
    return [
        parted(ids[i * step : i * step + length], [end - i * step for end in ends])
        for i in range((len(ids) - 1) // step)
    ]


@pytest.fixture(params=[64, 1 << 20])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked through in small parts, and whole."""
    monkeypatch.setattr(id_blocks, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(pack, "BATCH_ROWS", 5)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_rows_are_those_of_olmo_core(tmp_path: Path, dtype: str, parts: None) -> None:
    files = [drawn(count, seed) for seed, count in enumerate((1000, 15, 16, 333, 64))]
    files[4][:48] = EOS
    for i, ids in enumerate(files):
        # OLMo-core's .npy files have no header, numpy's have one: both are read
        flat = tmp_path / f"part-{i}.npy"
        np.save(flat, ids.astype(dtype)) if i % 2 else flat.write_bytes(ids.astype(np.dtype(dtype)).tobytes())
    source = {"path": str(tmp_path / "*.npy"), "dtype": dtype}
    assert rows_of(tmp_path / "cache", source) == olmo_rows(files, 16)
    whole = [(ids, [16]) for ids, _ in olmo_rows(files, 16) if set(ids) != {EOS}]
    unparted = rows_of(tmp_path / "cache", {**source, "end_id": None})
    assert [row for row in unparted if set(row[0]) != {EOS}] == whole


@pytest.mark.parametrize("code", [8, 4])
def test_rows_are_those_of_megatron(tmp_path: Path, code: int, parts: None) -> None:
    ids = drawn(700)
    ends = [1, 2, 30, 31, 32, 240, 255, 256, 511, 700]  # some where a row ends, or next to it
    sequences = np.split(ids, [17, *ends[:-1]][1:])
    path = write_index(tmp_path / "web.bin", sequences, range(len(sequences) + 1), code)
    assert rows_of(tmp_path / "cache", path) == megatron_rows(ids, ends, 16)
    unparted = rows_of(tmp_path / "cache", {"path": str(path), "end_id": None})
    assert unparted == megatron_rows(ids, [], 16)
    by_id = rows_of(tmp_path / "cache", {"path": str(path), "end_id": EOS})
    assert by_id == megatron_rows(ids, (np.flatnonzero(ids == EOS) + 1).tolist(), 16)
    joined = write_index(tmp_path / "joined.bin", sequences, [0, 3, 3, len(sequences)], code)  # several to a document
    assert rows_of(tmp_path / "cache", joined) == megatron_rows(ids, [ends[2]], 16)
    twice = rows_of(tmp_path / "cache", [str(path), str(joined)])
    assert twice == megatron_rows(ids, ends, 16) + megatron_rows(ids, [ends[2]], 16)


def test_documents_are_packed_whole(tmp_path: Path, parts: None) -> None:
    ids = drawn(1000)
    path = tmp_path / "tokens.bin"
    path.write_bytes(ids.astype("<u4").tobytes())
    rows = rows_of(tmp_path / "cache", {"path": str(path), "dtype": "uint32"}, rows="packed")
    documents = [part for part in np.split(ids, np.flatnonzero(ids == EOS) + 1) if len(part)]
    pieces = [part[at : at + 16] for part in documents for at in range(0, len(part), 16)]
    wanted = sorted(part.tolist() for part in pieces if len(part) > 1)
    found = [part.tolist() for ids_, lengths in rows for part in np.split(ids_, np.cumsum(lengths)[:-1])]
    assert sorted(found) == wanted
    assert rows_of(tmp_path / "cache", {"path": str(path), "dtype": "uint32", "end_id": None}, rows="packed") == [
        parted(ids[at : at + 16], []) for at in range(0, 1000, 16)
    ]


def test_texts_are_cut_end_to_end_too(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "rows.jsonl", [{"text": "the answer " * n} for n in range(1, 12)])
    found = rows_of(tmp_path / "cache", path)
    spec = tiny.request(tmp_path / "cache", path, pretrain=True)
    stream = [token.id for view in explain(spec, 99) for token in view.tokens]
    assert [ids for ids, _ in found] == [stream[at : at + 16] for at in range(0, len(stream) - 15, 16)]


@pytest.mark.parametrize(("name", "dtype", "ids", "times", "keys", "message"), cases(__file__, "what_is_refused"))
def test_what_is_refused(
    tmp_path: Path, name: str, dtype: str | None, ids: Any, times: int, keys: dict[str, Any], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids of a type are an array that numpy writes; a text is written as it is."""
    monkeypatch.setattr(id_blocks, "MOST_IDS", 512)
    monkeypatch.setattr(id_blocks, "BLOCK_BYTES", 512)
    path = tmp_path / name
    path.write_text(ids * times) if dtype is None else np.save(path, np.tile(np.array(ids, dtype), times))
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "cache", {"path": str(path), **keys}, rows="packed")


@pytest.mark.parametrize(("at", "value", "message"), cases(__file__, "a_damaged_index_is_refused"))
def test_a_damaged_index_is_refused(tmp_path: Path, at: int, value: str, message: str) -> None:
    index = write_index(tmp_path / "web.bin", np.split(drawn(30), 3), [0, 1, 2, 3]).with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[at : at + 1] = value.encode("latin-1")
    index.write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "cache", tmp_path / "web.bin")
