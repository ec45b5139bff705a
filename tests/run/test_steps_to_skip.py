"""Steps that the recipe leaves out: nothing is trained in them, and everything after them is where it was."""

from pathlib import Path

import pytest
import torch

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.config.load import load_recipe
from tuner.train.guard import Guard

SKIPS = {
    "train__steps_to_skip": "[2, 4-5]", "train__duration": "6 steps", "checkpoint__every": "never",
    "logging__spike_score": "6",
}  # fmt: skip
LEFT_OUT = {2, 4, 5}


def test_they_change_nothing_but_their_updates(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the guard had judged each of them as one to leave out; stopped and resumed it is the same."""
    whole = launch(workplace, **SKIPS)
    log = lines(whole.run_dir)
    assert [line["step"] for line in log] == list(range(1, 7))
    for line in log:
        assert (line.get("reason") == "steps_to_skip") == (line["step"] in LEFT_OUT) == ("skipped" in line)
        assert (line["loss"] is None) == (line["grad_norm"] is None) == (line["step"] in LEFT_OUT)
        assert (line["tok_per_s"] == 0) == (line["step"] in LEFT_OUT) == ("spike_score" not in line)
    expected = trainings.outcome(whole.run_dir)

    parts = SKIPS | {"name": "parts"}
    assert launch(workplace, train__stop_after="4 steps", **parts).step == 4
    assert trainings.outcome(launch(workplace, "must", **parts).run_dir) == expected

    judge, judged = Guard.judge, []

    def judged_bad(guard: Guard, values: torch.Tensor, overflow: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        judged.append(values)
        bad = values * float("nan") if len(judged) in LEFT_OUT else values
        return judge(guard, bad)

    monkeypatch.setattr(Guard, "judge", judged_bad)
    guarded = SKIPS | {"name": "guarded", "train__steps_to_skip": "[]", "train__nonfinite": "{skip: 9}"}
    other = trainings.outcome(launch(workplace, **guarded).run_dir)
    assert other["sha256"] == expected["sha256"]
    trained = [(a, b) for a, b in zip(other["log"], expected["log"], strict=True) if a["step"] not in LEFT_OUT]
    assert all(a == b for a, b in trained) and len(trained) == 3


def test_a_later_launch_keeps_to_what_one_before_it_leaves_out(workplace: Path) -> None:
    plain = {"train__duration": "4 steps", "checkpoint__every": "never"}
    assert launch(workplace, train__stop_after="1 step", **plain).step == 1
    added = plain | {"train__steps_to_skip": "[2-3]"}
    stopped = launch(workplace, "must", train__stop_after="1 step", **added)
    assert trainings.record(stopped.run_dir)["recipe"]["train"]["steps_to_skip"] == ["2-3"]
    resolved = load_recipe(stopped.run_dir / "recipe.resolved.yaml").recipe
    assert [str(steps) for steps in resolved.train.steps_to_skip] == ["2-3"]
    ended = launch(workplace, "must", **added)
    assert [line.get("reason") for line in lines(ended.run_dir)] == [None, "steps_to_skip", "steps_to_skip", None]
