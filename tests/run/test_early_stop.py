"""Where runs end and what stays of them: early by evaluations, at a step of a longer plan, by a file for many runs; and
checkpoints that stay for good by an interval.
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import open_checkpoint
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.train.plan import Plan
from tuner.train.progress import Criterion, EarlyStop, Progress
from tuner.train.tasks import Event

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


TWELVE = {"train__duration": "12 steps", "eval__samples": "0"}


def saves(run: Path) -> list[int]:
    """The steps of the checkpoints that are there, the oldest first."""
    return sorted(step for step, _ in step_dirs(run / "checkpoints"))


KEPT = {**TWELVE, "checkpoint__keep": "1", "checkpoint__keep_every": "5 steps"}


def test_an_interval_stays_besides_what_rolls(workplace: Path) -> None:
    run = launch(workplace, **KEPT, checkpoint__every="2 steps").run_dir
    assert saves(run) == [5, 10, 12]
    plain = launch(workplace, name="plain", **TWELVE, checkpoint__every="2 steps").run_dir
    assert lines(run) and [line.get("loss") for line in lines(run)] == [line.get("loss") for line in lines(plain)]


def test_a_run_that_was_stopped_keeps_the_same(workplace: Path) -> None:
    stopped = launch(workplace, **KEPT, checkpoint__every="2 steps", train__stop_after="7 steps")
    assert (stopped.status, saves(stopped.run_dir)) == ("stopped", [5, 7])
    run = launch(workplace, "must", **KEPT, checkpoint__every="2 steps").run_dir
    # What a launch resumed from stays with it, and goes with the next.
    assert saves(run) == [5, 7, 10, 12]


@pytest.mark.slow("false")
@pytest.mark.parametrize("in_background", ["true", "false"])
def test_a_run_goes_on_from_the_save_before_its_first_step(in_background: str, workplace: Path) -> None:
    evaluated = {**TWELVE, "data__eval": "4 documents", "eval__every": "never"}
    begins = {**evaluated, "checkpoint__every": "never", "checkpoint__at_start": "true", "checkpoint__keep": "1"}
    begins["checkpoint__async_save"] = in_background
    stopped = launch(workplace, **begins, train__stop_after="1 steps")
    first, at_start = stopped.run_dir / "checkpoints" / "step-1", stopped.run_dir / "checkpoints" / "step-0"
    shutil.rmtree(first)  # as if it was killed before that
    untrained = dict(read_tensors(open_checkpoint(at_start)))
    run = launch(workplace, "must", **begins).run_dir
    assert saves(run) == [0, 12], "the first is never pruned"
    assert [line["step"] for line in lines(run) if line["kind"] == "eval"] == [0, 12], "it is not evaluated once more"
    plain = launch(workplace, name="plain", **evaluated).run_dir
    assert [line.get("loss") for line in lines(run)] == [line.get("loss") for line in lines(plain)]
    trained = dict(read_tensors(open_checkpoint(run / "checkpoints" / "step-12")))
    assert not any(tensor.any() for name, tensor in untrained.items() if "lora_B" in name), "the update is nothing yet"
    assert not any(torch.equal(trained[name], tensor) for name, tensor in untrained.items())


def test_what_the_keys_say_no_more_goes(workplace: Path) -> None:
    launch(workplace, **KEPT, checkpoint__every="2 steps", train__stop_after="8 steps")
    fewer = {**KEPT, "checkpoint__keep_every": "4 steps"}
    run = launch(workplace, "must", **fewer, checkpoint__every="2 steps").run_dir
    assert saves(run) == [8, 12]


@pytest.mark.parametrize(("apart", "wanted"), [("1", [2, 5, 8, 10, 12]), ("2", [2, 5, 10, 12])])
def test_nothing_rolls_so_near_to_one_that_stays(
    apart: str, wanted: list[int], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    made = Event.__init__

    def noted(event: Event, stage: str, step: int, *others: object, **more: object) -> None:
        if stage == "save":
            found.append(step)
        made(event, stage, step, *others, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Event, "__init__", noted)
    launch(workplace, **KEPT, checkpoint__every="2 steps", checkpoint__not_within=apart)
    assert found == wanted


def test_a_run_ends_under_the_schedule_of_a_longer_one(workplace: Path) -> None:
    whole = launch(workplace, name="whole", **TWELVE)
    short = launch(workplace, **TWELVE, train__end_at="5")
    assert (short.status, saves(short.run_dir)[-1]) == ("finished", 5)
    steps = [line for line in lines(whole.run_dir) if line["kind"] == "train"]
    found = [line for line in lines(short.run_dir) if line["kind"] == "train"]
    assert [(line["loss"], line["lr"]) for line in found] == [(line["loss"], line["lr"]) for line in steps[:5]]
    again = launch(workplace, "must", **TWELVE, train__end_at="5")
    assert again.status == "finished" and len(lines(short.run_dir)) == len(lines(again.run_dir))
    launch(workplace, "must", **TWELVE, train__end_at="9")
    assert saves(short.run_dir)[-1] == 9
    launch(workplace, "must", **TWELVE, train__end_at="null")
    beyond = launch(workplace, name="beyond", **TWELVE, train__end_at="400")
    assert outcome(short.run_dir) == outcome(whole.run_dir) == outcome(beyond.run_dir)


def test_one_file_stops_many_runs_and_stays(workplace: Path) -> None:
    file = workplace / "stop-all"
    file.touch()
    for name in ("one", "other"):
        stopped = launch(workplace, name=name, **TWELVE, train__stop_file=str(file))
        assert stopped.status == "stopped" and saves(stopped.run_dir) == [1]
        assert "stop-all (train.stop_file)" in (stopped.run_dir / "run.json").read_text()
    assert file.exists()
    file.unlink()
    finished = launch(workplace, "must", name="one", **TWELVE, train__stop_file=str(file))
    assert finished.status == "finished"
    with pytest.raises(RecipeError, match="end_at"):
        launch(workplace, name="third", **TWELVE, train__end_at="0")
