"""Files of record batches: the bytes of Arrow's own writer, hashed on the way."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tuner.data.building import stream_file
from tuner.data.building.stream_file import StreamFiles
from tuner.data.prepared import arrow

SCHEMA = pa.schema([("a", pa.uint32())])


def batch(size: int) -> pa.RecordBatch:
    return pa.record_batch([arrow(np.arange(size, dtype=np.uint32))], schema=SCHEMA)


def written_by_arrow(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for one in batches:
            writer.write_batch(one)
    return bytes(sink.getvalue())


def test_the_bytes_are_those_of_arrows_own_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_file, "FLUSH_BYTES", 1000)
    batches = [batch(100 + 17 * i) for i in range(7)]
    path = tmp_path / "train.arrow"
    with StreamFiles(SCHEMA) as files:
        for one in batches:
            files.append(path, one.serialize())
            files.append(path, None)  # a bundle without documents
        entries = files.entries()
    expected = written_by_arrow(batches)
    assert path.read_bytes() == expected
    assert entries == {path.name: {"size": len(expected), "sha256": hashlib.sha256(expected).hexdigest()}}


def test_files_one_after_the_other_and_empty_ones(tmp_path: Path) -> None:
    with StreamFiles(SCHEMA) as files:
        for name, part in (("train.0.arrow", None), ("eval.arrow", batch(9).serialize()), ("empty.arrow", None)):
            files.append(tmp_path / name, part)
            files.append(tmp_path / "train.0.arrow", None)  # that is there
        entries = files.entries()
    assert (tmp_path / "train.0.arrow").read_bytes() == (tmp_path / "empty.arrow").read_bytes() == written_by_arrow([])
    assert (tmp_path / "eval.arrow").read_bytes() == written_by_arrow([batch(9)])
    assert sorted(entries) == ["empty.arrow", "eval.arrow", "train.0.arrow"]
    for name, entry in entries.items():
        assert entry["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_what_cannot_be_written_is_an_error_and_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "train.arrow").write_bytes(b"mine")
    with StreamFiles(SCHEMA) as files, pytest.raises(FileExistsError):
        files.append(tmp_path / "train.arrow", None)
        files.append(tmp_path / "train.arrow", None)
    assert (tmp_path / "train.arrow").read_bytes() == b"mine"
    with StreamFiles(SCHEMA) as files, pytest.raises(FileExistsError):
        files.append(tmp_path / "train.arrow", None)
        files.entries()
