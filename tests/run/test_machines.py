"""Stored runs on machines without a common disk: what their stages are brought to, and whole saves on rank 0's."""

import os
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
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import DataError
from tuner.run import store as machines
from tuner.rundir.in_store import bring, publish
from tuner.runtime.process import Collective
from tuner.stages import stage_of
from tuner.stores.client import Client

URL = "s3://bucket/runs/x"


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
