"""Which checkpoints are kept for good."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.checkpoint.manifest import step_dirs
from tuner.config.methods import DpoMethod
from tuner.config.numbers import Duration
from tuner.errors import RecipeError
from tuner.run.options import LaunchOptions
from tuner.run.tasks import evaluate as evaluate_task
from tuner.train.evaluate import Evaluation
from tuner.train.plan import Plan, mark_steps
from tuner.train.progress import Best, Criterion, best_after, best_of

HELD = {"data__eval": "7 documents", "eval__every": "2 steps", "eval__samples": "0", "train__duration": "12 steps"}
SPARSE = {"checkpoint__every": "6 steps", "checkpoint__keep": "1"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace that is copied; a step is of two rows."""
    directory = tmp_path_factory.mktemp("prepared")
    trainings.prepare(directory, 1, layers=1)
    recipe = directory / "r.yaml"
    recipe.write_text(re.sub(r"_batch_size: \d", "_batch_size: 2", recipe.read_text()))
    return directory


def losses(monkeypatch: pytest.MonkeyPatch, by_step: dict[int, float]) -> None:
    """Evaluations give these losses in the order of their steps."""
    left = iter([loss for _, loss in sorted(by_step.items())])
    monkeypatch.setattr(evaluate_task, "evaluate", lambda *_: Evaluation(next(left), 1))


def steps(run: Path) -> list[int]:
    return sorted(step for step, _ in step_dirs(run / "checkpoints"))


def test_marks_are_steps_of_the_run() -> None:
    plan, tokens = Plan(rows=40, global_batch_size=4, steps_per_epoch=10, total_steps=20), np.full(40, 100)
    marks = [Duration.parse(text) for text in ("3 steps", "1 epoch", "50%", "6000 tokens", "100%")]
    assert mark_steps(marks, plan, tokens) == {3, 10, 15, 20}
    assert mark_steps([], plan, tokens) == frozenset()
    with pytest.raises(RecipeError, match=r"checkpoint.marks: 3 epochs is step 30, the run ends at 20"):
        mark_steps([*marks, Duration.parse("3 epochs")], plan, tokens)


def test_the_best_is_the_lowest_and_the_earlier_of_equals() -> None:
    loss, of_b = Criterion(), Criterion("eval/loss/b")
    assert best_after(None, None, 4, {"loss": 1.0}) is None
    assert best_after(None, loss, 0, {"loss": 1.0}) is None
    first = best_after(None, loss, 4, {"loss": 1.0})
    assert first == Best("eval/loss", 4, 1.0)
    assert best_after(first, loss, 8, {"loss": 1.0}) is first
    assert best_after(first, loss, 8, {"loss": float("nan")}) is first
    assert best_after(first, loss, 8, {"loss": 0.5}) == Best("eval/loss", 8, 0.5)
    assert best_after(None, of_b, 4, {"loss": 1.0, "loss/b": 3.0}) == Best("eval/loss/b", 4, 3.0)
    assert best_after(None, of_b, 4, {"loss": 1.0}) is None
    assert first is not None
    assert best_of(json.loads(json.dumps(asdict(first))), "eval/loss") == first
    assert best_of(asdict(first), "eval/loss/b") is None


def test_the_best_is_the_highest_where_that_is_better() -> None:
    figures = DpoMethod().figures
    accuracy = Criterion.of("eval/accuracy/chats", figures)
    assert accuracy == Criterion("eval/accuracy/chats", "higher")
    assert Criterion.of("eval/reward_rejected", figures) == Criterion("eval/reward_rejected", "lower")
    assert Criterion.of("eval/loss/accuracy", figures) == Criterion("eval/loss/accuracy", "lower")
    assert Criterion.of(None, figures) is None
    best = None
    for step, value in ((2, 0.5), (4, 0.75), (6, 0.75), (8, float("inf")), (10, 0.6)):
        best = best_after(best, accuracy, step, {"loss": 1.0 / step, "accuracy": 0.1, "accuracy/chats": value})
    assert best == Best("eval/accuracy/chats", 4, 0.75)


def test_marked_steps_are_saved_and_never_pruned(workplace: Path) -> None:
    flags = {"checkpoint__marks": "[3 steps, 5 steps, 75%]", "checkpoint__every": "4 steps", "checkpoint__keep": "1"}
    flags |= {"checkpoint__at_end": "false", "train__duration": "12 steps"}
    assert steps(launch(workplace, **flags).run_dir) == [3, 5, 9]  # 9 is the newest, and marked
    late = {"checkpoint__marks": "[100%]", "checkpoint__at_end": "false", "checkpoint__every": "never"}
    assert steps(launch(workplace, name="late", train__duration="2 steps", **late).run_dir) == [2]


def test_the_best_evaluation_is_saved_and_stays(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"checkpoint__keep_best": "eval/loss", **HELD, **SPARSE}
    losses(monkeypatch, {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 3.0, 12: 9.0})
    result = launch(workplace, **flags)
    assert steps(result.run_dir) == [4, 12]
    record = json.loads((result.run_dir / "run.json").read_text())
    assert record["best"] == result.metrics["best"] == {"metric": "eval/loss", "step": 4, "value": 3.0}


def test_the_last_evaluation_is_saved_where_it_is_the_best(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"checkpoint__keep_best": "eval/loss", "checkpoint__at_end": "false", "checkpoint__keep": "1", **HELD}
    flags |= {"train__duration": "6 steps"}
    losses(monkeypatch, {step: 20.0 - step for step in range(0, 8, 2)})
    assert steps(launch(workplace, checkpoint__every="never", **flags).run_dir) == [6]  # 4 was the best before


def test_a_run_that_goes_on_remembers_its_best(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"checkpoint__keep_best": "eval/loss", **HELD, **SPARSE}
    losses(monkeypatch, {0: 1.0, 2: 5.0, 4: 3.0, 6: 4.0})
    run = launch(workplace, train__stop_after="7 steps", **flags).run_dir
    stopped = shutil.copytree(run, workplace / "stopped")
    assert steps(run) == [4, 7]

    def go_on(**more: Any) -> list[int]:
        losses(monkeypatch, {8: 3.5, 10: 3.2, 12: 9.0})
        found = steps(launch(workplace, LaunchOptions(resume="auto"), **(flags | more)).run_dir)
        shutil.rmtree(run)
        shutil.copytree(stopped, run)
        return found

    assert go_on() == [4, 7, 12]  # 7 is what it went on from
    assert go_on(checkpoint__keep_best="null") == [7, 12]
    shutil.rmtree(run / "checkpoints" / "step-4")
    assert go_on() == [7, 10, 12]


def test_a_loss_that_nothing_measures_is_refused(workplace: Path) -> None:
    with pytest.raises(RecipeError, match="no evaluation measures eval/loss/orders") as refused:
        launch(workplace, checkpoint__keep_best="eval/loss/orders", **HELD)
    assert refused.value.hint == "write eval/loss"
    with pytest.raises(RecipeError, match=r"eval/accuracy  is not measured with method.kind: sft; write eval/loss"):
        launch(workplace, checkpoint__keep_best="eval/accuracy", **HELD)
    with pytest.raises(RecipeError, match=r"keep_best eval/loss  needs held-out rows"):
        launch(workplace, checkpoint__keep_best="eval/loss")
    never = {"eval__every": "never", "eval__at_end": "false"}
    with pytest.raises(RecipeError, match=r"keep_best eval/loss  needs evaluations"):
        launch(workplace, checkpoint__keep_best="eval/loss", **(HELD | never))
