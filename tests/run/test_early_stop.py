"""A run ends early by its evaluations alone: at the same step however often it was stopped, finished and saved."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.train.plan import Plan
from tuner.train.progress import Criterion, EarlyStop, Progress

FLAGS = {
    "data__eval": "25%",
    "eval__every": "1 step",
    "eval__samples": "0",
    "eval__patience": "2",
    "eval__min_delta": "10",
    "train__duration": "5 steps",
}


STEPS = (3.0, 3.1, 3.2, 3.3, 2.0, 2.1, 2.2)
"""Of evaluations at steps 0, 10 and so on: one that is better in the meantime starts the count again."""


@pytest.mark.parametrize(
    ("losses", "every", "options", "ends_at"),
    [
        ([3.0, 2.0, 2.5, 2.4], 1, {}, 3),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.0], 1, {}, 5),
        ([3.0, 2.9, 2.8, 2.0], 1, {"min_delta": 0.5}, 2),
        ([3.0, math.nan, math.inf], 1, {}, 2),
        ([3.0, 3.0, 3.0], 1, {}, 2),
        ([3.0, 2.0, 1.0, 0.5], 1, {}, None),
        *((STEPS, 10, {"min_steps": least}, end) for least, end in ((0, 20), (15, 20), (20, 20), (21, 30), (35, 60))),
        (STEPS, 10, {"min_steps": 70}, None),
    ],
)
def test_it_is_due_after_so_many_evaluations_that_are_not_lower(
    losses: Sequence[float], every: int, options: dict[str, Any], ends_at: int | None
) -> None:
    """Those before min_steps count and end nothing."""
    whole = EarlyStop(2, **{"min_delta": 0.0, **options})
    due = []
    for number, loss in enumerate(losses):
        whole.evaluated(number * every, {"loss": loss})
        due += [number * every] if whole.is_due else []
        again = EarlyStop(2, **{"min_delta": 0.0, **options})
        again.restore(json.loads(json.dumps(whole.as_state())))
        assert again == whole
    assert (due[0] if due else None) == ends_at


def test_an_evaluation_without_the_figure_does_not_count() -> None:
    whole = EarlyStop(2, 0.0, Criterion("eval/quiz/acc", "higher"))
    for line in ({"quiz/acc": 0.5}, {"loss": 1.0}, {"loss": 0.9}, {"quiz/acc": 0.4}, {"loss": 0.8}):
        whole.evaluated(1, line)
    assert whole.stale == 1 and not whole.is_due


def test_it_goes_by_what_the_best_is_kept_by() -> None:
    whole = EarlyStop(2, 0.1, Criterion("eval/accuracy", "higher"))
    for step, accuracy in enumerate((0.5, 0.7, 0.75, 0.6)):
        assert not whole.is_due
        whole.evaluated(step, {"loss": 1.0 - step, "accuracy": accuracy})
    said = "eval/accuracy did not rise by 0.1 above the 0.7000 of step 1 in 2 evaluations"
    assert whole.is_due and said in whole.reason()
    other = EarlyStop(2, 0.1)
    other.restore(whole.as_state())
    assert other == EarlyStop(2, 0.1), "another figure is counted from its first evaluation"


def test_only_a_run_with_a_patience_has_it_in_its_state() -> None:
    plain, patient = Progress(Plan(4, 4, 1, 5)), Progress(Plan(4, 4, 1, 5), early=EarlyStop(1, 0.0))
    assert patient.as_state().keys() - plain.as_state().keys() == {"early_stop"}
    for progress in (plain, patient):
        progress.evaluated({"loss": 2.0})
        progress.evaluated({"loss": 2.0})
    assert (plain.is_over, plain.is_finished) == (False, False)
    assert (patient.is_over, patient.is_finished, patient.is_last_step) == (True, True, False)


def test_a_run_ends_early_at_the_same_step_however_often_it_was_stopped(workplace: Path) -> None:
    run = workplace / "runs" / "r"
    whole = launch(workplace, **FLAGS)
    assert (whole.status, whole.step, whole.total_steps) == ("finished", 2, 5)
    assert whole.checkpoint == run / "checkpoints" / "step-2"
    record = trainings.record(run)
    assert record["status"] == "finished"
    assert record["launches"][-1]["why"].startswith("early: eval/loss did not fall by 10 below the ")
    assert launch(workplace, **FLAGS).step == 2, "finished is finished"
    expected = trainings.outcome(run)

    later = FLAGS | {"name": "later", "train__min_steps": "4"}
    assert launch(workplace, **later).step == 4
    assert launch(workplace, "must", **later | {"train__min_steps": "3"}).step == 4

    parts = FLAGS | {"name": "parts"}
    stopped = launch(workplace, train__stop_after="1 step", **parts)
    assert (stopped.status, stopped.step) == ("stopped", 1)
    ended = launch(workplace, "must", **parts)
    assert (ended.status, ended.step) == ("finished", 2)
    assert trainings.outcome(ended.run_dir) == expected


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"min_steps": 4}, "holds off an early stop, and there is none; set eval.patience, such as 3"),
        ({"min_steps": 4, "duration": "3 steps", "patience": 2}, "got 4; the run is 3 steps"),
    ],
)
def test_min_steps_needs_an_early_stop_within_the_run(train: dict[str, object], said: str) -> None:
    patience = {"eval": {"patience": train.pop("patience")}} if "patience" in train else {}
    recipe = {"model": {"name_or_path": "a/b"}, "data": {"train": "x", "eval": "2%"}, "train": train}
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(recipe | patience)


def test_patience_needs_held_out_rows(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="eval.patience: needs held-out rows|eval.patience  needs held-out rows"):
        load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "eval": {"patience": 2}})
