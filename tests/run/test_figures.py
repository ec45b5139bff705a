"""Figures that change nothing of a run: the file beside each mark, over stops and resumes; and the loss of each process
by itself, a column of the log, here of one process.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.tables import cases
from tests.fixtures.trainings import launch, lines, outcome
from tuner.data.batches import Batch
from tuner.run.options import LaunchOptions
from tuner.run.parts.local_loss import LocalLoss
from tuner.run.tasks.trackers.choose import point_of
from tuner.train.methods.method import Sum, Terms
from tuner.train.progress import CLOCKED

MARKED = {
    "train__duration": "10 steps", "eval__samples": "0", "data__eval": "4 documents", "eval__every": "3 steps",
    "eval__marks": "[4 steps, 8 steps]", "checkpoint__marks": "[10 steps]", "checkpoint__at_start": "true",
}  # fmt: skip


def test_each_mark_has_its_figures(workplace: Path) -> None:
    run = launch(workplace, **MARKED, train__stop_after="5 steps").run_dir
    marks = run / "marks"
    assert sorted(path.name for path in marks.iterdir()) == ["metrics_step0.json", "metrics_step4.json"]
    (marks / "metrics_step8.json").write_text("{}")  # of a launch that was killed before it saved that step
    launch(workplace, "must", **MARKED, train__stop_after="1 steps")
    assert not (marks / "metrics_step8.json").exists(), "it is measured again"
    launch(workplace, "must", **MARKED)
    assert {path.name for path in marks.iterdir()} == {f"metrics_step{step}.json" for step in (0, 4, 8, 10)}
    for step in (0, 4, 8, 10):
        found = json.loads((marks / f"metrics_step{step}.json").read_text())
        of_step = [line for line in lines(run) if line["step"] == step]
        assert {line["kind"] for line in of_step} == ({"train", "eval"} if step else {"eval"})
        wanted = {name: value for line in of_step for name, value in point_of(line).values.items()}
        assert found == {"step": step, "tokens": next((line["tokens"] for line in of_step if step), 0), **wanted}
        assert found["eval/loss"] > 0


def test_a_run_without_marks_has_no_such_file(workplace: Path) -> None:
    run = launch(workplace, train__duration="2 steps").run_dir
    assert not (run / "marks").exists()


STEPS = {"train__duration": "4 steps", "checkpoint__every": "2 steps"}


def test_nothing_changes_but_for_the_column(workplace: Path) -> None:
    plain = launch(workplace, name="plain", **STEPS).run_dir
    launch(workplace, name="all", **STEPS, logging__metrics_of="all", train__stop_after="2 steps")
    every = launch(workplace, LaunchOptions("must"), name="all", **STEPS, logging__metrics_of="all").run_dir
    assert outcome(every) == outcome(plain)
    for line, other in zip(lines(every), lines(plain), strict=True):
        assert line["local_loss"] == pytest.approx(line["loss"], rel=1e-6)
        assert [name for name in line if name not in other] == ["local_loss"] and set(other) <= set(line)
        assert {line[name] == other[name] for name in set(other) - set(CLOCKED)} == {True}


@pytest.mark.parametrize(("counts", "sharers", "found"), cases(__file__, "a_mean_over_nothing_is_left_out"))
def test_a_mean_over_nothing_is_left_out(counts: dict[str, float], sharers: int, found: dict[str, float]) -> None:
    step: Any = SimpleNamespace(batches=SimpleNamespace(micro=[_batch(), _batch()]))
    method: Any = SimpleNamespace(counts=lambda batches: counts if batches.documents == 2 else {})
    progress: Any = SimpleNamespace(step=6)
    part = LocalLoss(method, sharers, progress)
    for _ in range(2):  # a step begins with nothing of the one before it
        part.before_forward(step)
        for _ in step.batches.micro:
            terms = Terms({"tokens": Sum(torch.tensor(4.0), "tokens"), "pairs": Sum(torch.tensor(1.0), "pairs")}, {})
            assert part.terms(_batch(), terms) is terms
    part.after_update(torch.tensor(False))
    assert (part.of({"step": 6}), part.of({"step": 7}), part.of({"step": 7})) == ({}, found, {})


def _batch() -> Batch:
    ids = np.zeros(3, dtype=np.int64)
    return Batch(ids, ids, ids, (3,), np.arange(2), np.arange(1))
