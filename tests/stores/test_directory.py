"""Commits of a store directory: whole or absent, of one writer, fetched as they were published; and who may publish:
one launch, until its lease is given back, has run out, or its process is gone.
"""

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from tests.stores.conftest import Faulty, Opened, contents, filled
from tuner.errors import DataError, MachineError
from tuner.stores import client
from tuner.stores import directory as directories
from tuner.stores.commit import FILES, LEASE, Commit, StoredFile, commit_key, read_commit
from tuner.stores.directory import StoreDirectory
from tuner.stores.stage import RACY_NS, StageState


def published(directory: StoreDirectory, stage: Path, step: int = 1) -> Commit:
    with directory.lease(stage, lock_is_free=True):
        return directory.publish(directory.snapshot(stage, {"step": step}))


def keys(store: MemoryStore, prefix: str = "") -> list[str]:
    return sorted(each["path"] for page in obstore.list(store, prefix) for each in page)


def test_what_is_published_is_fetched(opened: Opened, stage: Path, tmp_path: Path) -> None:
    assert opened().newest() is None
    commit = published(opened(local=("lock",)), stage)
    fetched = opened().fetch(tmp_path / "there")
    assert fetched == commit and commit.note == {"step": 1}
    (stage / "lock").unlink()
    assert contents(tmp_path / "there") == contents(stage)


def test_only_what_changed_is_put(opened: Opened, library: Faulty, stage: Path) -> None:
    directory = opened(local=("lock",))
    with directory.lease(stage, lock_is_free=True):
        directory.publish(directory.snapshot(stage, {}))
        os.utime(stage / "checkpoints" / "step-1" / "weights.bin")  # touched, with the same bytes
        filled(stage, 2)
        library.puts.clear()
        commit = directory.publish(directory.snapshot(stage, {}))
    data = [key for key in library.puts if key.startswith(FILES)]
    assert len(data) == 3 + 1 + 1  # parts of the weights, the manifest, the log
    assert set(commit.files) >= {"checkpoints/step-1/weights.bin", "checkpoints/step-2/weights.bin"}
    assert [commit.files["checkpoints/step-2/weights.bin"].size, len(commit.data)] == [2500, 9]


def test_a_snapshot_is_of_its_moment(opened: Opened, stage: Path, tmp_path: Path) -> None:
    then, directory = contents(stage), opened()
    with directory.lease(stage, lock_is_free=True):
        snapshot = directory.snapshot(stage, {})
        shutil.rmtree(stage / "checkpoints")
        filled(stage, 2)
        directory.publish(snapshot)
    opened().fetch(tmp_path / "there")
    assert contents(tmp_path / "there") == then


def test_a_file_that_is_cut_meanwhile_makes_no_commit(opened: Opened, stage: Path) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        snapshot = directory.snapshot(stage, {})
        os.truncate(stage / "checkpoints" / "step-1" / "weights.bin", 1500)
        with pytest.raises(DataError, match=r"step-1/weights.bin: was cut to 1,500 bytes"):
            directory.publish(snapshot)
    assert opened().newest() is None


def test_two_commits_stay_and_their_data(opened: Opened, store: MemoryStore, stage: Path) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        for step in range(2, 6):
            shutil.rmtree(stage / "checkpoints")
            last = directory.publish(directory.snapshot(filled(stage, step), {}))
        before = read_commit(directory._client, last.number - 1)
    assert before is not None
    assert keys(store, "tuner/commits") == [commit_key(last.number - 1), commit_key(last.number)]
    assert set(keys(store, FILES)) == last.data | before.data


def test_a_snapshot_is_taken_while_another_is_uploaded(
    opened: Opened, library: Faulty, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, taken, put_files = threading.Event(), threading.Event(), directories.upload

    def upload(*words: Any) -> dict[str, StoredFile]:
        going.set()
        assert taken.wait(20), "it waits for the upload"
        return put_files(*words)

    monkeypatch.setattr(directories, "upload", upload)
    directory = opened()
    time.sleep(RACY_NS / 1e9)  # what has changed a moment before is never known
    with directory.lease(stage, lock_is_free=True), ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(directory.publish, directory.snapshot(stage, {}))
        assert going.wait(20)
        second = directory.snapshot(stage, {})
        taken.set()
        first = publishing.result(20)
        library.puts.clear()
        assert directory.publish(second).files == first.files
        assert not [key for key in library.puts if key.startswith(FILES)], "put by the one before"


def test_data_of_a_snapshot_that_waits_stay(opened: Opened, stage: Path, tmp_path: Path) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        directory.publish(directory.snapshot(stage, {}))
        waiting, then = directory.snapshot(stage, {"waiting": True}), contents(stage)
        shutil.rmtree(stage / "checkpoints")
        for step in range(2, 6):
            directory.publish(directory.snapshot(filled(stage, step), {}))
            shutil.rmtree(stage / "checkpoints")
        directory.publish(waiting)
    opened().fetch(tmp_path / "there")
    assert contents(tmp_path / "there") == then


def test_what_an_upload_left_is_collected(opened: Opened, store: MemoryStore, library: Faulty, stage: Path) -> None:
    directory = opened()
    first = published(directory, stage)
    library.fail("commits/0000000004", 9, carried_out=False)
    with pytest.raises(MachineError, match="s3://bucket/run: the store does not answer"):
        published(opened(), filled(stage, 2))
    library.fail("", 0, carried_out=False)
    owner = json.loads(bytes(obstore.get(store, LEASE).bytes()))["owner"]
    assert opened().newest() == replace(first, number=3, writer=owner)
    again = opened()
    with again.lease(stage, lock_is_free=True):
        assert again.collect() == 5
        assert set(keys(store, FILES)) == first.data
        assert again.collect() == 0


@pytest.mark.parametrize(("carried_out", "times"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("word", ["commits/0000000002", LEASE])
def test_an_answer_that_is_lost_is_found_out(
    opened: Opened, library: Faulty, stage: Path, word: str, carried_out: bool, times: int
) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        library.fail(word, times, carried_out)
        commit = directory.publish(directory.snapshot(stage, {}))
        assert (commit.number, library.left) == (2, 0)
    assert opened().newest() == commit


def test_a_commit_that_was_taken_for_failed_is_followed(opened: Opened, library: Faulty, stage: Path) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        late = Commit(2, "late", "another", {})
        assert directory._put(late)  # a put of a dead writer, on its way until now
        commit = directory.publish(directory.snapshot(stage, {}))
        assert commit.number == 3
    assert opened().newest() == commit


@pytest.mark.parametrize("commits", [1, 4])  # of the four, two are removed: the number of the stopped one is free
def test_a_writer_whose_lease_was_taken_commits_no_more(
    opened: Opened, stage: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    stopped, second = opened(), opened()
    monkeypatch.setattr(directories, "RENEWALS", 1e-3)  # it finds out itself
    with stopped.lease(stage, lock_is_free=True) as lost:
        snapshot = stopped.snapshot(stage, {})
        with second.lease(stage, lock_is_free=True):
            for _ in range(commits):
                last = second.publish(second.snapshot(stage, {}))
        known = StageState.read(stage).commit_id
        with pytest.raises(MachineError, match=r"another launch, \S+ pid \d+, has taken s3://bucket/run over"):
            stopped.publish(snapshot)
        assert lost.taken_by is not None
        assert StageState.read(stage).commit_id == known, "its stage is based on what is there"
    assert opened().newest() == last


@pytest.mark.parametrize("moment", ["_numbers", "names"])
def test_a_writer_whose_lease_was_taken_removes_nothing(
    opened: Opened, store: MemoryStore, stage: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is stopped before it lists commits, or data; what it finds afterwards is another's."""
    monkeypatch.setattr(directories, "RENEWALS", 1e-3)
    stopped, second = opened(), opened()
    of: Any = StoreDirectory if moment == "_numbers" else client.Client
    listed = getattr(of, moment)

    def overtaken(self: Any, *words: Any) -> Any:
        if words in ((), (FILES,)):
            monkeypatch.setattr(of, moment, listed)
            with second.lease(stage, lock_is_free=True):
                for step in range(2, 6):
                    shutil.rmtree(stage / "checkpoints")
                    second.publish(second.snapshot(filled(stage, step), {}))
        return listed(self, *words)

    with stopped.lease(stage, lock_is_free=True):
        monkeypatch.setattr(of, moment, overtaken)
        with pytest.raises(MachineError, match="has taken s3://bucket/run over"):
            stopped.collect()
    last = opened().newest()
    assert last is not None and last.data <= set(keys(store, FILES))
    assert len(keys(store, "tuner/commits")) == directories.KEPT_COMMITS


def test_a_writer_without_a_lease_is_a_mistake(opened: Opened, stage: Path) -> None:
    with pytest.raises(RuntimeError, match="the lease was not taken"):
        opened().publish(opened().snapshot(stage, {}))


def test_a_listing_that_lags_is_made_up_for(
    opened: Opened, stage: Path, monkeypatch: pytest.MonkeyPatch, store: MemoryStore
) -> None:
    directory = opened()
    with directory.lease(stage, lock_is_free=True):
        for step in range(2, 6):
            last = directory.publish(directory.snapshot(filled(stage, step), {}))
    monkeypatch.setattr(StoreDirectory, "_numbers", lambda _: {2})
    assert opened().newest() == last
    obstore.delete(store, LEASE)  # then the numbers that follow are asked for
    monkeypatch.setattr(StoreDirectory, "_numbers", lambda _: {last.number - 1})
    assert opened().newest() == last


def test_a_stage_of_the_newest_commit_is_left_as_it_is(opened: Opened, stage: Path) -> None:
    commit = published(opened(), stage)
    filled(stage, 2)
    here = contents(stage)
    assert opened().fetch(stage) == commit
    assert contents(stage) == here
    for left in ((), ("recipe.yaml",)):  # emptied, or begun again: nothing there is newer than the store
        shutil.rmtree(stage)
        stage.mkdir()
        for name in left:
            (stage / name).touch()
        opened().fetch(stage)
        assert (stage / "checkpoints" / "step-1" / "weights.bin").is_file()


def test_where_the_store_is_newer_it_wins(opened: Opened, stage: Path, tmp_path: Path) -> None:
    published(opened(), stage)
    opened().fetch(elsewhere := tmp_path / "elsewhere")
    published(opened(), filled(elsewhere, 2), 2)
    filled(stage, 3)  # never published
    (stage / "checkpoints" / "step-1" / "weights.bin").unlink()
    log = (stage / "metrics.jsonl").read_bytes()
    directory = opened(local=("lock",))
    directory.fetch(stage)
    assert contents(stage) == contents(elsewhere)
    assert directory.set_aside is not None and directory.set_aside.parent == tmp_path
    aside = contents(directory.set_aside)
    assert (aside.pop("metrics.jsonl"), {Path(name).parts[1] for name in aside}) == (log, {"step-3"})


def test_a_part_is_fetched(opened: Opened, stage: Path, tmp_path: Path) -> None:
    published(opened(), filled(stage, 2))
    there = tmp_path / "there"
    opened().fetch(there, only=lambda name: name == "checkpoints/step-2/manifest.json")
    assert sorted(contents(there)) == [f"checkpoints/step-2/{name}" for name in ("manifest.json", "weights.bin")]
    opened().fetch(there)
    assert contents(there) == contents(stage)


def test_a_checkpoint_is_whole_or_absent(
    opened: Opened, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(opened(), stage)
    there, seen = tmp_path / "there", []
    rename = os.rename

    def renamed(source: Any, target: Any) -> None:
        seen.append((Path(target).name, len(contents(Path(source)))))
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    opened().fetch(there)
    assert ("step-1", 2) in seen
    (there / "checkpoints" / "step-1" / "weights.bin").write_bytes(b"damaged")
    StageState().write(there)
    opened().fetch(there)
    assert contents(there) == contents(stage)


def test_a_reader_whom_a_newer_commit_overtakes_reads_that(
    opened: Opened, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(opened(), stage)
    reader, newest = opened(), StoreDirectory.newest

    def overtaken(self: StoreDirectory) -> Commit | None:
        monkeypatch.setattr(StoreDirectory, "newest", newest)
        commit = newest(self)
        shutil.rmtree(stage / "checkpoints")
        published(opened(), filled(stage, 2))
        published(opened(), stage)
        return commit

    monkeypatch.setattr(StoreDirectory, "newest", overtaken)
    reader.fetch(tmp_path / "there")
    assert contents(tmp_path / "there") == contents(stage)


def test_the_stage_of_a_living_writer_is_his(opened: Opened, stage: Path, tmp_path: Path) -> None:
    published(opened(), stage)
    opened().fetch(elsewhere := tmp_path / "elsewhere")
    published(opened(), filled(elsewhere, 2))
    with opened().lease(stage, lock_is_free=True):
        opened().fetch(stage)
        assert not (stage / "checkpoints" / "step-2").exists()
    opened().fetch(stage)
    assert (stage / "checkpoints" / "step-2").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda document: document.replace(b'"number":2', b'"number":7'), "damaged"),
        (lambda document: document.replace(b'"schema":1', b'"schema":2'), "another version"),
        (lambda document: document[:50], "not the listing of a commit"),
        (lambda _: b"[]", "not the listing of a commit"),
    ],
)
def test_a_damaged_listing_is_refused_by_name(
    opened: Opened, store: MemoryStore, stage: Path, damage: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "ATTEMPTS", 1)
    commit = published(opened(), stage)
    key = commit_key(commit.number)
    obstore.put(store, key, damage(bytes(obstore.get(store, key).bytes())))
    with pytest.raises(DataError, match=rf"s3://bucket/run/{key}: .*{message}"):
        opened().fetch(stage)


def test_an_answer_that_breaks_off_is_asked_for_again(
    opened: Opened, library: Faulty, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(opened(), stage)
    library.broken = 3
    opened().fetch(tmp_path / "there")
    assert contents(tmp_path / "there") == contents(stage)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0)
    library.broken = 99
    with pytest.raises(MachineError, match="the store does not answer"):
        opened().newest()


def test_damaged_data_are_refused(opened: Opened, store: MemoryStore, stage: Path, tmp_path: Path) -> None:
    commit = published(opened(), stage)
    key = next(iter(commit.files["checkpoints/step-1/weights.bin"].parts()))[0]
    for data, message in ((b"x" * 1000, "other bytes"), (b"x", "1 bytes, its commit says"), (b"x" * 2000, "2,000")):
        obstore.put(store, key, data)
        with pytest.raises(DataError, match=message):
            opened().fetch(tmp_path / "there")
    assert not list(tmp_path.glob("there/**/weights.bin"))
    obstore.delete(store, key)
    with pytest.raises(DataError, match="is gone"):
        opened().fetch(tmp_path / "there")


@pytest.mark.parametrize("target", ["/etc/passwd", "../other", "a/../../b"])
def test_a_link_that_leads_out_is_refused(opened: Opened, stage: Path, target: str) -> None:
    (stage / "out").symlink_to(target)
    directory = opened()
    with directory.lease(stage, lock_is_free=True), pytest.raises(DataError, match=f"out is a link to {target}"):
        directory.snapshot(stage, {})


def put(store: MemoryStore, **facts: object) -> None:
    obstore.put(store, LEASE, json.dumps({"host": "other", "pid": 7, "epoch": 3, "number": 0, **facts}).encode())


def facts(store: MemoryStore) -> dict[str, object]:
    return dict(json.loads(bytes(obstore.get(store, LEASE).bytes())))


def test_a_lease_is_renewed_and_given_back(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        first = facts(store)
        time.sleep(0.3)
        assert facts(store)["beat"] > first["beat"]  # type: ignore[operator]
    assert facts(store)["released"]
    said: list[str] = []
    with opened().lease(tmp_path, lock_is_free=False, on_wait=said.append):
        assert (facts(store)["epoch"], said) == (2, [])


def test_one_that_runs_out_is_taken_after_its_time(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    put(store)
    said: list[str] = []
    start = time.monotonic()
    with opened().lease(tmp_path, lock_is_free=True, on_wait=said.append):
        assert time.monotonic() - start > 0.4
        assert facts(store)["epoch"] == 4
    assert said == ["waiting up to 0 s for the lease of other pid 7 to run out"]


def test_one_that_is_renewed_is_another_launch(opened: Opened, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        with pytest.raises(MachineError, match=r"s3://bucket/run is in use by another launch, \S+ pid \d+"):
            opened().lease(tmp_path, lock_is_free=False).__enter__()
        with pytest.raises(MachineError, match="in use"):
            opened().lease(tmp_path / "other", lock_is_free=True).__enter__()


def test_one_of_a_process_that_is_gone_is_taken_at_once(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True):
        left = facts(store)
    put(store, **{**left, "released": False})
    said: list[str] = []
    with opened().lease(tmp_path, lock_is_free=True, on_wait=said.append):
        assert said == []


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]"])
def test_a_damaged_one_runs_out(opened: Opened, store: MemoryStore, tmp_path: Path, damaged: bytes) -> None:
    obstore.put(store, LEASE, damaged)
    with opened().lease(tmp_path, lock_is_free=True):
        assert facts(store)["epoch"] == 1


def test_a_store_that_ignores_conditions_is_refused(opened: Opened, library: Faulty, tmp_path: Path) -> None:
    library.unconditional = True
    with pytest.raises(MachineError, match="s3://bucket/run: this store does not look at the conditions of puts"):
        opened().lease(tmp_path, lock_is_free=True).__enter__()


def test_one_that_was_removed_is_put_again(opened: Opened, store: MemoryStore, tmp_path: Path) -> None:
    with opened().lease(tmp_path, lock_is_free=True) as lease:
        obstore.delete(store, LEASE)
        lease.renew()
        assert facts(store)["owner"] == lease.owner
