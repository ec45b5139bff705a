"""Runs in object stores: fetched before a launch, published after each save and at its end, by one launch at a time; on
machines without a common disk their stages are brought to one state, and saves are whole on rank 0's.
"""

import io
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
from obstore.store import MemoryStore

from tests.checkpoint.states import equal, full_state
from tests.checkpoint.test_ranks import spread
from tests.fixtures.processes import run_ranks
from tests.fixtures.tables import cases
from tests.fixtures.trainings import lines, loaded, outcome, trained
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import DataError, MachineError, RecipeError
from tuner.run import store as machines
from tuner.run.options import Resume, RunResult
from tuner.run.status import branch_source
from tuner.run.store import Publisher
from tuner.run.stored import in_store
from tuner.rundir import in_store as places
from tuner.rundir.in_store import bring, bring_inputs, publish
from tuner.rundir.record import read_run
from tuner.rundir.run_json import hold
from tuner.runtime.console import Console
from tuner.runtime.files import read_json
from tuner.runtime.process import Collective
from tuner.stages import stage_of
from tuner.stores import client, directory
from tuner.stores.client import Client
from tuner.stores.directory import StoreDirectory
from tuner.stores.stage import StageState
from tuner.train.tasks import Event, Request

URL = "s3://bucket/runs/x"
LATER = "s3://bucket/runs/later"


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, MemoryStore]:
    """The stores of a test by URL, in memory."""
    made: dict[str, MemoryStore] = {}

    def connect(url: str) -> client.Client:
        return client.Client(url, made.setdefault(url, MemoryStore()), obstore)

    monkeypatch.setattr(client.Client, "connect", staticmethod(connect))
    return made


@pytest.fixture
def said() -> tuple[Console, Callable[[], str]]:
    """A console, and what it has said."""
    stream = io.StringIO()
    return Console(stream=stream), stream.getvalue


def launched(directory: Path, url: str, resume: Resume = "never", **flags: str) -> RunResult:
    recipe = loaded(directory, output_dir=url, **flags)
    with in_store(recipe, Console(main=False)):
        return trained(recipe, resume)


def quiet(*_: object) -> None:
    """Says nothing."""


def refusing(*_: object) -> Any:
    raise MachineError("s3://bucket: the store does not answer", hint="wait")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: dict[str, MemoryStore]) -> Path:
    """The stage of a directory with one file."""
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    path = stage_of(URL)
    path.mkdir(parents=True)
    (path / "a").write_text("1")
    return path


def test_a_run_whose_stage_is_lost_is_resumed_from_its_store(workplace: Path, stores: dict[str, MemoryStore]) -> None:
    plain = launched(workplace, "plain", train__duration="10 steps")
    stopped = launched(workplace, URL, train__duration="10 steps", train__stop_after="5 steps")
    assert stopped.run_dir == stage_of(URL)
    kept = {path.name for path in (stopped.run_dir / "checkpoints").iterdir()}
    shutil.rmtree(stopped.run_dir)
    bring(stopped.run_dir, quiet)
    assert kept == {path.name for path in (stopped.run_dir / "checkpoints").iterdir()} == {"step-4", "step-5"}
    assert lines(stopped.run_dir)[-1]["step"] == 5
    assert URL in (stopped.run_dir / "recipe.resolved.yaml").read_text()
    assert launched(workplace, URL, "must", train__duration="10 steps").status == "finished"
    assert outcome(stage_of(URL)) == outcome(plain.run_dir)
    before = StoreDirectory.open(URL).newest()
    assert before is not None and before.files["run.json"].size == (stage_of(URL) / "run.json").stat().st_size
    assert launched(workplace, URL, "must", train__duration="10 steps").status == "finished"
    after = StoreDirectory.open(URL).newest()
    assert after is not None and after.number == before.number, "nothing is published where nothing changed"
    branched = launched(workplace, "branch", stage_of(URL) / "checkpoints" / "step-5", train__duration="10 steps")
    (launch,) = read_json(branched.run_dir / "run.json")["launches"]
    assert launch["began_from"] == f"{URL}/checkpoints/step-5"
    assert branch_source({"launches": [launch]}) == stage_of(URL) / "checkpoints" / "step-5"


def test_a_run_that_cannot_be_published_is_kept_and_published_later(
    workplace: Path, stores: dict[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "publish", refusing)
        with pytest.raises(MachineError, match=r"^not published: .*does not answer") as caught:
            launched(workplace, LATER, train__duration="2 steps")
    hint = str(caught.value.hint)
    assert f"all of it is in {stage_of(LATER)}" in hint and f"tuner resume {LATER}" in hint
    assert StoreDirectory.open(LATER).newest() is None
    assert launched(workplace, LATER, "must", train__duration="2 steps").status == "finished"
    stored = StoreDirectory.open(LATER).newest()
    assert stored is not None and "checkpoints/step-2/manifest.json" in stored.files


def test_a_save_that_fails_is_a_warning_and_the_next_one_publishes_all(
    stage: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[Console, Callable[[], str]]
) -> None:
    console, text = said
    with Publisher(stage, console) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(StoreDirectory, "publish", refusing)
            publisher.notify(Event("save", 1, 0))
            assert publisher._next is not None
            publisher._next[1].result(20)
            assert "training continues" in text()
        (stage / "b").write_text("2")
        publisher.notify(Event("step", 1, 0))
        publisher.notify(Event("save", 2, 0))
    stored = StoreDirectory.open(URL).newest()
    assert stored is not None and stored.files.keys() == {"a", "b"}


def test_a_run_that_another_launch_takes_over_stops_in_order(stage: Path) -> None:
    console = Console(main=False)
    words = r"^not published: another launch, .* has taken s3://bucket/runs/x over"
    with pytest.raises(MachineError, match=words), Publisher(stage, console) as publisher:
        assert publisher.request() == Request.NONE
        with StoreDirectory.open(URL).lease(stage, lock_is_free=True), pytest.raises(MachineError):
            publisher._lease.renew()
        assert publisher.request() == Request.STOP


def test_a_second_launch_is_refused_by_name(stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(directory, "TTL_SECONDS", 0.4)
    with Publisher(stage, Console(main=False)):
        monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "other"))
        stage_of(URL).mkdir(parents=True)
        with pytest.raises(MachineError, match=r"is in use by another launch, .* pid \d+"):
            Publisher(stage_of(URL), Console(main=False)).__enter__()


def test_a_stage_that_is_removed_under_its_launch_is_named(stage: Path) -> None:
    publish(stage)
    with StoreDirectory.open(URL).lease(stage, lock_is_free=True):
        shutil.rmtree(stage)
        with pytest.raises(MachineError, match=r"a launch on this machine has not ended, whose stage was removed"):
            bring(stage, quiet)


def test_a_stage_that_is_behind_its_store_is_not_published(
    stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (stage / "kept").write_text("0")
    publish(stage)
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "other"))
    bring(stage_of(URL), quiet)
    (stage_of(URL) / "a").write_text("2")
    publish(stage_of(URL))
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    (stage / "a").write_text("3")
    for act in (publish, lambda path: Publisher(path, Console(main=False)).__enter__()):
        with pytest.raises(MachineError, match=r"another launch has published there"):
            act(stage)
    assert bring(stage, quiet)
    assert (stage / "a").read_text() == "2"


def test_a_look_leaves_the_stage_open_for_the_rest(stage: Path) -> None:
    for name in ("run.json", "checkpoints/step-4/manifest.json", "exports/step-4/config.json"):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text("{}")
    publish(stage)
    shutil.rmtree(stage)
    assert bring(stage, quiet, "look")
    assert {path.name for path in stage.iterdir()} == {"a", "run.json"}
    assert StageState.read(stage).commit_id is None, "nothing is published from a part"
    assert bring(stage / "exports" / "step-4", quiet, "model")
    assert (stage / "exports" / "step-4" / "config.json").is_file() and not (stage / "checkpoints").exists()
    assert bring(stage, quiet)
    assert (stage / "checkpoints" / "step-4" / "manifest.json").is_file()


FILES = ("run.json", "checkpoints/step-4/a", "checkpoints/step-12/a", "checkpoints/step-12/b", "exports/step-4/a")


@pytest.mark.parametrize(("inside", "extent", "which", "wanted"), cases(__file__, "what_is_fetched_of_a_run"))
def test_what_is_fetched_of_a_run(inside: str, extent: Any, which: Any, wanted: tuple[int, ...] | None) -> None:
    found = places._meant(FILES, Path(inside), extent, which)
    assert found == (None if wanted is None else frozenset(FILES[number] for number in wanted))


def test_an_export_in_its_run_is_published_with_it(stage: Path) -> None:
    export = stage / "exports" / "step-4"
    later = stage / "exports" / "step-12" / "config.json"
    for path in (stage / "run.json", stage / "checkpoints" / "step-4" / "a", export / "config.json", later):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (stage / "exports" / "latest").symlink_to("step-12")
    with hold(stage):
        publish(export)
    assert StoreDirectory.open(URL).newest() is None, "its launch does that"
    publish(export)
    first = StoreDirectory.open(URL).newest()
    assert first is not None and {"a", "checkpoints/step-4/a"} < first.files.keys(), "nothing was there yet"
    shutil.rmtree(stage)
    assert bring(stage, quiet, "model")
    export.mkdir(parents=True)
    (stage / "exports" / "latest").symlink_to("step-4")
    for path in (stage / "a", export / "other.json"):
        path.write_text("changed")
    publish(export)
    then = StoreDirectory.open(URL).newest()
    assert then is not None and StageState.read(stage).commit_id is None, "a part of the run is here"
    kept = {name: file for name, file in first.files.items() if name != "exports/step-4/config.json"}
    assert dict(then.files) == {**kept, "exports/step-4/other.json": then.files["exports/step-4/other.json"]}
    assert StoreDirectory.open(f"{URL}/exports/step-4").newest() is None


def test_errors_name_the_url_of_a_stage(stage: Path) -> None:
    with pytest.raises(RecipeError, match=f"^{URL} is not a run: "):
        read_run(stage)


def test_an_export_is_fetched_whole() -> None:
    assert places._meant(("config.json", "model.safetensors"), Path(), "model", "newest") is None


def test_data_is_fetched_by_its_etags(stage: Path, stores: dict[str, MemoryStore]) -> None:
    bucket = stores["s3://bucket"] = MemoryStore()
    for key in ("d/a.jsonl", "d/sub/b.jsonl", "d/notes.bin"):
        obstore.put(bucket, key, key.encode())
    told: list[str] = []

    def brought(*urls: str) -> list[str]:
        told.clear()
        bring_inputs({"data.train": [stage_of(url) for url in urls]}, lambda _, text: told.append(text))
        root = stage_of("s3://bucket/d")
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    assert brought("s3://bucket/d/*.jsonl") == ["a.jsonl"]
    assert brought("s3://bucket/d/**/*.jsonl", "s3://bucket/d/a.jsonl[:10%]") == ["a.jsonl", "sub/b.jsonl"]
    assert brought("s3://bucket/d/**/*.jsonl", "s3://bucket/d/a.jsonl[:10%]") and told == []
    assert brought("s3://bucket/d") == ["a.jsonl", "notes.bin", "sub/b.jsonl"]
    obstore.put(bucket, "d/a.jsonl", b"changed")
    obstore.delete(bucket, "d/sub/b.jsonl")
    assert brought("s3://bucket/d") == ["a.jsonl", "notes.bin"]
    assert told == ["fetching 1 object of s3://bucket/d, 0.0 MB"]
    assert stage_of("s3://bucket/d/a.jsonl").read_bytes() == b"changed"
    with pytest.raises(RecipeError, match=r"^data.train: s3://bucket/e: the store has nothing there"):
        brought("s3://bucket/e")
    obstore.put(bucket, "odd/a\\b", b"")
    with pytest.raises(DataError, match=r"s3://bucket/odd/a\\b: names in it"):
        brought("s3://bucket/odd")


def test_an_object_that_changes_while_it_is_fetched_is_refused(
    stage: Path, stores: dict[str, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = stores["s3://bucket"] = MemoryStore()
    obstore.put(bucket, "d/a", b"1")
    listed = client.Client.metas

    def metas(self: client.Client, prefix: str) -> Any:
        found = listed(self, prefix)
        obstore.put(bucket, "d/a", b"2")
        return found

    monkeypatch.setattr(client.Client, "metas", metas)
    with pytest.raises(DataError, match=r"s3://bucket/d/a: changed while it was fetched"):
        bring_inputs({"data.train": [stage_of("s3://bucket/d")]}, quiet)
    assert not list(stage_of("s3://bucket/d").iterdir())


def test_a_model_is_a_published_one_or_plain_objects(stage: Path, stores: dict[str, MemoryStore]) -> None:
    publish(stage)
    shutil.rmtree(stage)
    bucket = stores["s3://bucket"] = MemoryStore()
    obstore.put(bucket, "models/m/config.json", b"{}")
    bring_inputs({"model.init_from": [stage], "model.name_or_path": [stage_of("s3://bucket/models/m")]}, quiet)
    assert (stage / "a").read_text() == "1"
    assert stage_of("s3://bucket/models/m/config.json").read_bytes() == b"{}"


class Rank:
    """A rank of a launch in a thread, whose turn it is while it works: then the environment is its machine's."""

    size = 2
    _turn, _met, _given = threading.Lock(), threading.Barrier(2, timeout=20), [None, None]

    def __init__(self, rank: int, cache: Path) -> None:
        self.rank, self._cache = rank, cache

    def on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        with self._turn:
            os.environ["TUNER_CACHE"] = str(self._cache)
            self._given[self.rank] = work()
        self._met.wait()
        found = list(self._given)
        self._met.wait()
        return found

    def together(self, work: Callable[[], Any]) -> Any:
        return self.on_all_ranks(work)[self.rank]


def in_ranks(work: Callable[[int, Collective], Any], *caches: Path) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: work(rank, cast("Collective", Rank(rank, caches[rank]))), range(2)))


def write(stage: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text)


def found(stage: Path, *left_out: str) -> dict[str, str]:
    files = {str(path.relative_to(stage)): path for path in stage.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in files.items() if name not in left_out}


STORED = {"a": "1", "b": "1"}
LAUNCHED = {"run.json": '{"schema": "tuner.run/1", "launches": [{}]}'}


@pytest.mark.parametrize(
    ("begun", "changes", "wanted", "aside"),
    [
        ("", ({}, {}), {}, {}),
        ("", ({"a": "2"}, {"c": "2"}), {"a": "2"}, {"c": "2"}),
        ("12", ({"a": "2"}, {"c": "2"}), {"a": "2", "b": "1"}, {"c": "2"}),
        ("12", ({"c": "2"}, LAUNCHED), STORED | LAUNCHED, {"c": "2"}),
        ("1", ({"a": "2"}, LAUNCHED), {"a": "2", "b": "1"}, LAUNCHED),
        ("2", ({"c": "2"}, {"a": "2"}), {"a": "2", "b": "1"}, {"c": "2"}),
        ("0", ({"c": "2"}, {"b": "2"}), STORED, {"b": "2", "c": "2"}),
    ],
)
def test_all_machines_have_the_newest_state_that_is_in_step_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, changes: tuple[dict[str, str], ...],
    wanted: dict[str, str], aside: dict[str, str],
) -> None:  # fmt: skip
    """Machines 1 and 2; those that are ``begun`` are in step with what machine 0 has published, before their changes.
    """
    store, said = MemoryStore(), list[str]()
    monkeypatch.setattr(Client, "connect", staticmethod(lambda url: Client(url, store, obstore)))

    def stage(number: int) -> Path:
        monkeypatch.setenv("TUNER_CACHE", str(tmp_path / str(number)))
        return stage_of(URL)

    if begun:
        write(stage(0), STORED)
        publish(stage(0))
    for number in (1, 2):
        if str(number) in begun:
            bring(stage(number), lambda *_: None)
        write(stage(number), changes[number - 1])
    write(stage(2), {"logs/rank1.log": "2", "checkpoints/.tmp-step-4-id/rank-0001-of-0002.safetensors": "2"})
    stages = [stage(1), stage(2)]

    def settled(rank: int, ranks: Collective) -> list[int]:
        disks = machines.disks_of(stages[rank], ranks)
        machines.settle(stages[rank], disks, ranks, lambda _, text: said.append(text))
        return disks

    assert in_ranks(settled, tmp_path / "1", tmp_path / "2") == [[0, 1]] * 2
    assert not list(tmp_path.rglob("*.seen-*")), "what was looked for is gone"
    assert [found(path, "lock", "logs/rank1.log") for path in stages] == [wanted] * 2
    assert (stages[1] / "logs" / "rank1.log").is_file(), "which is its own"
    places = [path for each in stages for path in each.parent.glob(".x.aside-*")]
    assert {name: text for path in places for name, text in found(path).items()} == aside
    assert all(any(str(path) in text for text in said) for path in places)


def test_ranks_that_see_one_stage_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    assert in_ranks(lambda _, ranks: machines.disks_of(stage_of(URL), ranks), tmp_path, tmp_path) == [[0, 0]] * 2


@pytest.mark.multi
def test_files_of_another_machine_come_to_the_disk_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 have one disk, rank 2 has another, with a checkpoint that rank 0 has pruned."""
    monkeypatch.setattr(machines, "CHUNK_BYTES", 100)
    state, disks = full_state(5), [tmp_path / name for name in ("here", "here", "there")]
    (disks[2] / "step-0").mkdir(parents=True)

    def cut(path: Path, start: int, view: memoryview) -> None:
        if start:
            raise DataError(f"{path}: ends early")

    def save_rank(rank: int) -> None:
        run = CheckpointDir(disks[rank], "r", partial(machines.write_apart, (2,)))
        save(run, 1, spread(state), {}, {})
        with monkeypatch.context() as patch:
            patch.setattr(machines, "read_bytes", cut)
            with pytest.raises(DataError, match=r"rank-0002-of-0003.safetensors: ends early"):
                save(run, 2, spread(state), {}, {})

    assert run_ranks(3, tmp_path, save_rank) == [0] * 3
    assert equal(dict(read_tensors(open_checkpoint(disks[0] / "step-1"))), state)
    assert [path.name for path in (*disks[0].iterdir(), *disks[2].iterdir())] == ["step-1"], "nothing is left over"
