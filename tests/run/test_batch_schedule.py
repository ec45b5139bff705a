"""Batches that grow on the way: the rows keep their order, and a run in parts is the run in one."""

import json
from pathlib import Path

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.cli.work.schedule import planned_schedule
from tuner.errors import RecipeError

GROWING = json.dumps([{"after": "2 steps", "size": 16}, {"after": "4 steps", "size": 4}])
KEYS = {
    "train__duration": "7 steps", "train__batch_schedule": GROWING, "schedule__kind": "constant",
    "schedule__warmup": "never", "checkpoint__every": "never",
}  # fmt: skip


def test_a_run_in_parts_is_the_run_in_one(workplace: Path) -> None:
    scaled = KEYS | {"train__batch_scales_lr": "true", "optimizer__lr": "1e-3"}
    run = launch(workplace, **scaled).run_dir
    found = [line for line in lines(run) if line["kind"] == "train"]
    rates = [1.0, 1.0, *[2**0.5] * 2, *[0.5**0.5] * 3]  # of 8 rows: 16 in steps 3 and 4, then 4
    assert [line["lr"] for line in found] == pytest.approx([1e-3 * rate for rate in rates])
    tokens = [after["tokens"] - before["tokens"] for before, after in zip([{"tokens": 0}, *found], found, strict=False)]
    assert min(tokens[2:4]) > max(tokens[:2]) > max(tokens[4:])
    parts = scaled | {"name": "parts"}
    assert launch(workplace, train__stop_after="3 steps", **parts).step == 3
    resumed = launch(workplace, "must", **parts).run_dir
    assert trainings.outcome(resumed) == trainings.outcome(run)


def test_the_schedule_is_drawn_with_it(workplace: Path) -> None:
    found, _ = planned_schedule(trainings.loaded(workplace, **KEYS, train__batch_scales_lr="true").recipe)
    assert [found.schedule.factor(index) for index in (2, 3, 5)] == [1, 2**0.5, 0.5**0.5]


def test_what_does_not_fit_is_refused(workplace: Path) -> None:
    with pytest.raises(RecipeError, match=r"train.batch_schedule: 6 rows do not divide"):
        launch(workplace, **KEYS | {"train__batch_schedule": '[{"after": "2 steps", "size": 6}]'})
    launch(workplace, train__stop_after="1 step", **KEYS)
    with pytest.raises(RecipeError, match="train.batch_schedule"):
        launch(workplace, "must", **KEYS | {"train__batch_schedule": "[]"})
