"""The history of a whole launch's memory, with a stand-in for CUDA's allocator."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile import watch
from tuner.run import main as run_main
from tuner.run.parts.memory_history import MemoryHistory
from tuner.runtime import torch_private
from tuner.train import loop

FLAGS = {"profile__memory": "all", "train__duration": "3 steps", "profile__entries": "500"}


@pytest.fixture
def told(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the allocator is told, between what the launch does."""
    told: list[Any] = []

    def record(enabled: str | None, **more: Any) -> None:
        told.append((enabled, more.get("max_entries")))

    def dump(path: str) -> None:
        told.append("snapshot")
        Path(path).write_bytes(b"history")

    build = run_main.build
    monkeypatch.setattr(MemoryHistory, "planned", lambda *given: None)
    monkeypatch.setattr(torch_private, "record_memory_history", record, raising=False)
    monkeypatch.setattr(torch_private, "dump_snapshot", dump, raising=False)
    monkeypatch.setattr(run_main, "build", lambda *given: told.append("build") or build(*given))
    trainings.prepare(workplace, 1)
    return told


def test_a_whole_launch_is_recorded(workplace: Path, told: list[Any]) -> None:
    run = trainings.launch(workplace, name="whole", **FLAGS).run_dir
    assert told == [("all", 500), "build", "snapshot", (None, None)]
    assert [file.name for file in (run / "profile").iterdir()] == ["memory-all-rank0.pickle"]


def test_where_memory_runs_out_it_is_written_before_anything_is_given_back(
    workplace: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    explain = watch.StepWatch.explain
    monkeypatch.setattr(watch.StepWatch, "explain", lambda *given: told.append("explain") or explain(*given))
    monkeypatch.setattr(loop, "optimizer_step", lambda *given: (_ for _ in ()).throw(MemoryError("too little")))
    with pytest.raises(MemoryLimitError):
        trainings.launch(workplace, name="limit", **FLAGS)
    assert told == [("all", 500), "build", "snapshot", "explain", (None, None)]


def test_a_launch_that_fails_otherwise_leaves_it_too(
    workplace: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_main, "build", lambda *given: (_ for _ in ()).throw(MemoryError("too little")))
    with pytest.raises(MemoryLimitError):
        trainings.launch(workplace, name="early", **FLAGS)
    assert told == [("all", 500), "snapshot", (None, None)]


def test_it_is_refused_on_a_cpu(workplace: Path) -> None:
    trainings.prepare(workplace, 1)
    with pytest.raises(RecipeError, match="a history of CUDA's allocator") as caught:
        trainings.launch(workplace, name="cpu", **FLAGS)
    assert caught.value.hint == "write profile.memory: true"
