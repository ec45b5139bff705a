"""Whole launches that are watched: a profile over several processes, of what each holds, in one report for all; and the
history of memory, with a stand-in for CUDA's allocator.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import overrides
from tests.profile.test_measure import recipe  # noqa: F401 - a fixture
from tuner.config.load import load_recipe
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile import watch
from tuner.profile.measure import Measurement, MeasureOptions, of_all
from tuner.run import main as run_main
from tuner.run.measure import measure_recipe
from tuner.run.parts.memory_history import MemoryHistory
from tuner.runtime import torch_private
from tuner.train import loop


def measured(path: Path, **flags: str) -> Measurement:
    measured = measure_recipe(load_recipe(path, overrides(flags)), MeasureOptions(1), "error")
    assert measured.found is not None and measured.found.total_steps == measured.total_steps
    return measured.found


@pytest.mark.multi
@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
def test_two_processes_hold_half_of_what_one_does(recipe: Path) -> None:  # noqa: F811
    one, two = measured(recipe), measured(recipe, parallel__processes="2")
    assert (one.processes, two.processes) == (1, 2)
    assert "in each of 2 processes" in two.text() and "communication" in two.time_text()
    assert two.communication_s > 0 == one.communication_s
    assert two.tokens_per_step == one.tokens_per_step
    assert 0.3 * one.flops < two.flops < 0.7 * one.flops
    assert two.free_bytes < 0.6 * one.free_bytes
    assert two.memory.parts["optimizer"] == pytest.approx(one.memory.parts["optimizer"] / 2, rel=0.05)
    assert two.memory.parts["parameters"] == pytest.approx(one.memory.parts["parameters"] / 2, rel=0.05)
    # At the peak no more than the root's weights and one block's, gathered, and the buffers they came in.
    assert 0 < two.memory.parts["gathered"] < 2 * one.memory.parts["parameters"]
    assert not (recipe.parent / "runs").exists()


def test_one_report_for_all_is_of_the_process_where_memory_is_shortest(recipe: Path) -> None:  # noqa: F811
    first = measured(recipe)
    tight = replace(first, memory=replace(first.memory, peak_bytes=90), free_bytes=100, device="other")
    large = replace(first, memory=replace(first.memory, peak_bytes=200), free_bytes=1000)
    found = of_all([replace(first, memory=replace(first.memory, peak_bytes=1)), large, tight])
    assert (found.memory.peak_bytes, found.free_bytes, found.device) == (90, 100, first.device)


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
    monkeypatch.setattr(MemoryHistory, "after_plan", lambda *given: None)
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
