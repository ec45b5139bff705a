"""Steps that differ from others: batches that grow on the way, rows that are short at first, steps that are left out. A
run in parts is the run in one.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures import trainings
from tests.fixtures.trainings import in_parts, launch, lines
from tuner.cli.work.schedule import planned_schedule
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.train.guard import Guard

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
    assert trainings.outcome(in_parts(workplace, "3 steps", **scaled)) == trainings.outcome(run)


def test_the_schedule_is_drawn_with_it(workplace: Path) -> None:
    found, _ = planned_schedule(trainings.loaded(workplace, **KEYS, train__batch_scales_lr="true").recipe)
    assert [found.schedule.factor(index) for index in (2, 3, 5)] == [1, 2**0.5, 0.5**0.5]


def test_what_does_not_fit_is_refused(workplace: Path) -> None:
    with pytest.raises(RecipeError, match=r"train.batch_schedule: 6 rows do not divide"):
        launch(workplace, **KEYS | {"train__batch_schedule": '[{"after": "2 steps", "size": 6}]'})
    launch(workplace, train__stop_after="1 step", **KEYS)
    with pytest.raises(RecipeError, match="train.batch_schedule"):
        launch(workplace, "must", **KEYS | {"train__batch_schedule": "[]"})


def test_a_run_has_the_lengths_of_its_steps_wherever_it_was_stopped(workplace: Path) -> None:
    texts = [{"text": f"{n} " + "ab" * (n % 30 + 5)} for n in range(120)]
    (workplace / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    grown = {
        "data__train": str(workplace / "texts.jsonl"), "data__packing": "true", "method__kind": "pretrain",
        "train__length_warmup__steps": "4", "train__length_warmup__start": "8",
        "train__length_warmup__multiple_of": "8", "train__duration": "6 steps", "checkpoint__every": "never",
    }  # fmt: skip
    whole = launch(workplace, **grown)
    tokens = np.diff([0, *(line["tokens"] for line in lines(whole.run_dir))]).tolist()
    assert tokens[:4] == [8 * length for length in (8, 16, 32, 48)]
    assert min(tokens[4:]) > 8 * 56
    assert trainings.outcome(in_parts(workplace, "2 steps", **grown)) == trainings.outcome(whole.run_dir)
    longer = grown | {"train__length_warmup__start": "64", "name": "longer"}
    with pytest.raises(RecipeError, match="64 tokens are no fewer than a whole row's 64"):
        launch(workplace, **longer)


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

    assert trainings.outcome(in_parts(workplace, "4 steps", **SKIPS)) == expected

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
