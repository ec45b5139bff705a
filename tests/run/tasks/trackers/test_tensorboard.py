"""TensorBoard's files, read back with its own reader."""

import json
from pathlib import Path

import pytest

from tests.run.tasks.trackers.readers import tensorboard_points
from tuner.config.recipe import LoggingSection
from tuner.run.tasks.hooks import Hooks, RunFacts
from tuner.run.tasks.trackers.choose import tracker_hooks
from tuner.train.plan import Plan
from tuner.train.progress import Progress
from tuner.train.tasks import Event

pytest.importorskip("tensorboard")


def launch(run_dir: Path, from_step: int, warnings: list[str]) -> Hooks:
    section = LoggingSection.model_validate({"trackers": ["tensorboard"]})
    facts = RunFacts(run_dir, "abc", 8, {"name": "r"}, from_step)
    hooks = Hooks(tracker_hooks(section, lambda label, text: None, warnings.append), facts, Progress(Plan(8, 1, 8, 8)))
    hooks.notify(Event("start", from_step, 0))
    hooks.raise_error()
    return hooks


def take(hooks: Hooks, metrics: Path, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        line = {"kind": "train", "step": step, "loss": loss, "lr": 0.5}
        hooks.notify(Event("step", step, step, metrics=line))
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    hooks.notify(Event("evaluation", last, last, metrics={"kind": "eval", "step": last, "loss": loss}))


def test_a_resumed_run_shows_each_step_once_with_its_newest_value(tmp_path: Path) -> None:
    metrics, warnings = tmp_path / "metrics.jsonl", list[str]()
    first = launch(tmp_path, 0, warnings)
    take(first, metrics, 1, 5, loss=1.0)
    first.notify(Event("end", 5, 5, status="failed"))
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    second = launch(tmp_path, 3, warnings)
    take(second, metrics, 4, 8, loss=2.0)
    second.notify(Event("end", 8, 8, status="finished"))
    points = tensorboard_points(tmp_path)
    assert points["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), *((step, 2.0) for step in range(4, 9))]
    assert points["eval/loss"] == [(8, 2.0)]
    assert points["train/lr"] == [(step, 0.5) for step in range(1, 9)]
    assert warnings == []


def test_a_run_that_starts_over_shows_nothing_of_before(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = launch(tmp_path, 0, [])
    first.notify(Event("evaluation", 0, 0, metrics={"kind": "eval", "step": 0, "loss": 9.0}))
    take(first, metrics, 1, 2, loss=1.0)
    first.notify(Event("end", 2, 2, status="failed"))
    metrics.unlink()
    again = launch(tmp_path, 0, [])
    again.notify(Event("evaluation", 0, 0, metrics={"kind": "eval", "step": 0, "loss": 8.0}))
    take(again, metrics, 1, 3, loss=2.0)
    again.notify(Event("end", 3, 3, status="finished"))
    points = tensorboard_points(tmp_path)
    assert points["train/loss"] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert points["eval/loss"] == [(0, 8.0), (3, 2.0)]
