"""Prepared data in an object store: fetched before they are built, published after, their ids read in blocks."""

import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

from tests.data import tiny
from tests.stores.conftest import Faulty
from tuner.data.batches import GlobalBatches
from tuner.data.building import prepare as prepare_module
from tuner.data.building import stored
from tuner.data.building.cache import damages, entries
from tuner.data.building.prepare import PreparedInfo, find_prepared, prepare
from tuner.data.prepared import id_spans, open_prepared
from tuner.errors import TunerError
from tuner.runtime.console import Console
from tuner.stages import stage_of, url_of
from tuner.stores.client import Client
from tuner.stores.commit import FILES, commit_key

BLOCK = 512


class Library(Faulty):
    """obstore, which counts the blocks that it gives, and may answer otherwise."""

    blocks = 0

    def answer(self, data: bytes) -> bytes:
        return data

    def get_range(self, store: Any, key: str, **words: int) -> bytes:
        self.blocks += 1
        return self.answer(bytes(obstore.get_range(store, key, **words)))


class Machines:
    """Machines that share a bucket, each with a cache of its own."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.patch, self.library = place, monkeypatch, Library()
        self.stores: dict[str, MemoryStore] = {}
        texts = [tiny.chat(f"question {i}", f"answer {i}" + " very" * (i % 9)) for i in range(60)]
        self.rows = tiny.write_rows(place / "rows.jsonl", texts)

    def client(self, url: str) -> Client:
        return Client(url, self.stores.setdefault(url, MemoryStore()), self.library)

    def on(self, machine: str) -> Path:
        """Where this process is from now on; its cache directory there."""
        self.patch.setenv("TUNER_CACHE", str(self.place / machine))
        return stage_of("s3://bucket/cache")

    def prepare(self, machine: str) -> PreparedInfo:
        self.said = io.StringIO()
        return prepare(tiny.request(self.on(machine), self.rows), Console(stream=self.said))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path, monkeypatch)
    monkeypatch.setattr(Client, "connect", staticmethod(found.client))
    monkeypatch.setattr(stored, "WHOLE_BYTES", 0)
    monkeypatch.setattr(stored, "BLOCK_BYTES", BLOCK)
    return found


def steps(path: Path, rank: int = 0) -> list[list[list[int]]]:
    """The ids of each micro-batch of each step of a rank, over two epochs."""
    rows = open_prepared(path).train
    batches = GlobalBatches(
        rows, seed=1, shuffle=True, global_batch_size=4, micro_batch_size=1, rank=rank, world_size=2
    )
    taken = (batches.step(i).micro for i in range(2 * batches.steps_per_epoch))
    return [[batch.input_ids.tolist() for batch in micro] for micro in taken]


def test_another_machine_trains_on_the_same_rows_and_fetches_their_ids_as_it_reads_them(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = machines.prepare("a")
    monkeypatch.setattr(prepare_module, "build_once", None)  # nothing is built from here on
    assert machines.prepare("a").cached and not machines.library.blocks
    there = machines.prepare("b")
    assert (there.cached, there.key, there.report) == (True, built.key, built.report)
    assert there.path != built.path
    ids = there.path / "train.documents.arrow"
    assert ids.read_bytes() != (whole := (built.path / ids.name).read_bytes()) and len(whole) == ids.stat().st_size
    mine, theirs = open_prepared(built.path).train, open_prepared(there.path, verify=True).train
    assert np.array_equal(mine.trained_per_row, theirs.trained_per_row) and not machines.library.blocks
    theirs.row(0)
    assert 0 < machines.library.blocks <= 6
    machines.on("b")
    with ThreadPoolExecutor(2) as ranks:  # each with maps and blocks of its own, over one file
        found = list(ranks.map(lambda rank: steps(there.path, rank), range(2)))
    assert found == [steps(built.path, rank) for rank in range(2)]
    assert ids.read_bytes() == whole
    before = machines.library.blocks
    assert steps(there.path) == found[0] and machines.library.blocks == before, "all of it is here"
    entry = next(each for each in entries(machines.on("b")))
    assert damages(entry) == []


def test_blocks_that_a_killed_machine_left_half_written_are_fetched_again(machines: Machines) -> None:
    expected = steps(machines.prepare("a").path)
    ids = (there := machines.prepare("b").path) / "train.documents.arrow"
    steps(there)
    whole, written = ids.read_bytes(), machines.library.blocks
    with ids.open("r+b") as file:
        for start, stop in id_spans(ids):
            os.pwrite(file.fileno(), bytes((stop - start) // 2), start)
    assert ids.read_bytes() != whole
    assert steps(there) == expected and machines.library.blocks > written and ids.read_bytes() == whole
    os.truncate(ids, 100)  # another size is damage, and the entry fetched again
    assert steps(machines.prepare("b").path) == expected


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [("once", 0, ""), ("always", 3, "other bytes"), ("gone", 3, "is gone"), ("503", 4, "the store does not answer")],
)
def test_bytes_that_are_not_those_that_were_published_are_never_trained_on(
    machines: Machines, wrong: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(machines.prepare("a").path)
    there = machines.prepare("b").path
    client = machines.client(str(url_of(there)))
    if wrong == "gone":
        client.delete(client.names(FILES))

    def answer(data: bytes) -> bytes:
        if wrong == "503":
            raise obstore.exceptions.GenericError("status code: 503 Service Unavailable")
        return data[:-1] if wrong == "always" or machines.library.blocks == 1 else data

    monkeypatch.setattr(machines.library, "answer", answer)
    if not code:
        assert steps(there) == expected
        return
    with pytest.raises(TunerError, match=f"s3://bucket/cache/prepared/.*{words}") as caught:
        steps(there)
    assert caught.value.exit_code == code


def test_of_two_that_prepare_the_same_one_commit_stays(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machines.prepare("a")
    client = machines.client(str(url_of(first.path)))
    commit = client.get(commit_key(1))
    with monkeypatch.context() as patch:
        patch.setattr(stored, "find_entry", lambda _: None)  # as it was when the other one began
        assert not machines.prepare("b").cached
    found = stored.find_entry(client)
    assert client.get(commit_key(1)) == commit and found is not None
    assert set(client.names(FILES)) == found.data, "what the second one has uploaded is gone"
    shutil.rmtree(machines.on("b"))
    assert machines.prepare("b").report == first.report


def test_data_that_cannot_be_published_are_published_later_and_what_is_gone_is_built_again(machines: Machines) -> None:
    machines.library.fail("", 1000, carried_out=False)
    url = str(url_of(machines.prepare("a").path))
    said = " ".join(machines.said.getvalue().split())
    assert f"not published: {url}: the store does not answer" in said and not machines.client(url).names("")
    machines.library.left = 0
    assert find_prepared(tiny.request(machines.on("a"), machines.rows)) is not None, "which publishes nothing"
    assert not machines.client(url).names("")
    machines.prepare("a")
    assert "publishing" in machines.said.getvalue() and "not published" not in machines.said.getvalue()
    assert find_prepared(tiny.request(machines.on("b"), machines.rows)) is not None
    machines.stores.clear()
    assert find_prepared(tiny.request(machines.on("b"), machines.rows)) is None, "its blocks are nowhere"
    assert find_prepared(tiny.request(machines.on("a"), machines.rows)) is not None
