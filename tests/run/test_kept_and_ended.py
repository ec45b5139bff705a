"""Checkpoints that stay for good by an interval, runs that end at a step of a longer plan, and a file for many runs."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.fixtures.trainings import launch, lines, outcome
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import open_checkpoint
from tuner.errors import RecipeError
from tuner.train.tasks import Event

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
