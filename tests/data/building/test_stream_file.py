"""Files of record batches that others write, in places that they are given."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tuner.data.building import stream_file
from tuner.data.building.stream_file import HashBehind, StreamFiles, write_batch
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


@pytest.mark.parametrize("order", ["forth", "back", "mixed"])
def test_the_bytes_are_those_of_arrows_own_writer(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_file, "FLUSH_BYTES", 1000)
    batches = [batch(100 + 17 * i) for i in range(7)]
    numbers = list(range(0, 14, 2))  # what has no documents takes a number and no place
    path = tmp_path / "train.arrow"
    with StreamFiles(SCHEMA) as files:
        files.require(path, hash_behind=True)
        files.require(path, hash_behind=True)
        messages = {number: one.serialize() for number, one in zip(numbers, batches, strict=True)}
        places = {number: files.place(number, path, message.size) for number, message in messages.items()}
        if order != "forth":
            numbers = numbers[::-1] if order == "back" else random.Random(0).sample(numbers, len(numbers))
        for number in numbers:
            write_batch(places[number], messages[number])
            files.filled(number)
        entries = files.entries()
    expected = written_by_arrow(batches)
    assert path.read_bytes() == expected
    assert entries == {path.name: {"size": len(expected), "sha256": hashlib.sha256(expected).hexdigest()}}


def test_files_one_after_the_other_and_empty_ones(tmp_path: Path) -> None:
    one = batch(9).serialize()
    with StreamFiles(SCHEMA) as files:
        for name, hashed in (("train.0.arrow", False), ("empty.arrow", True), ("eval.arrow", True)):
            files.require(tmp_path / name, hashed)
        write_batch(files.place(0, tmp_path / "eval.arrow", one.size), one)
        files.filled(0)
        entries = files.entries()
    assert (tmp_path / "train.0.arrow").read_bytes() == (tmp_path / "empty.arrow").read_bytes() == written_by_arrow([])
    assert (tmp_path / "eval.arrow").read_bytes() == written_by_arrow([batch(9)])
    assert sorted(entries) == ["empty.arrow", "eval.arrow"]
    for name, entry in entries.items():
        assert entry["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_a_file_that_is_shorter_than_it_should_be_has_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "train.arrow"
    path.write_bytes(b"1234567")
    with pytest.raises(OSError, match="shorter than what was written"):
        HashBehind(path).hexdigest(8)
    assert HashBehind(path).hexdigest(7) == hashlib.sha256(b"1234567").hexdigest()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "train.arrow").write_bytes(b"mine")
    with StreamFiles(SCHEMA) as files, pytest.raises(FileExistsError):
        files.require(tmp_path / "train.arrow", hash_behind=False)
    assert (tmp_path / "train.arrow").read_bytes() == b"mine"
