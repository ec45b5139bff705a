"""Whole launches in this process: the schedule, stopping, resuming, pruning and the records they leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import resume_campaign
from tuner.checkpoint.load import newest
from tuner.checkpoint.steps import step_dirs
from tuner.config.load import load_recipe
from tuner.config.overrides import Override
from tuner.data.batches import GlobalBatches
from tuner.errors import RecipeError
from tuner.runtime.console import Console
from tuner.runtime.launch import Launch
from tuner.train.run import RunResult, TrainOptions, resume_source, train

TOTAL = 18


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    resume_campaign.prepare(tmp_path, 1)
    return tmp_path


def launch(directory: Path, options: TrainOptions | None = None, **flags: str) -> RunResult:
    overrides = [Override(key.replace("__", "."), text) for key, text in flags.items()]
    loaded = load_recipe(directory / "r.yaml", overrides, cwd=directory)
    return train(loaded, options or TrainOptions(), Launch(), Console(main=False))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_each_step_has_its_learning_rate(workplace: Path) -> None:
    result = launch(workplace, schedule__kind="linear", schedule__warmup="4 steps", schedule__min_lr_ratio="0.1")
    rates = [line["lr"] for line in lines(result.run_dir)]
    assert rates[:5] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3 * (1 - 0.9 / 14)])
    assert rates[-1] == pytest.approx(1e-4)


def test_stopped_and_resumed_is_the_unbroken_run(workplace: Path) -> None:
    whole = launch(workplace, name="whole")
    assert (whole.status, whole.step, whole.total_steps) == ("finished", TOTAL, TOTAL)
    stopped = launch(workplace, train__stop_after="5 steps")
    assert (stopped.status, stopped.step) == ("stopped", 5)
    again = train(resume_source(stopped.run_dir), TrainOptions(resume="must"), Launch(), Console(main=False))
    assert (again.status, again.step) == ("finished", TOTAL)
    assert resume_campaign.outcome(again.run_dir) == resume_campaign.outcome(whole.run_dir)
    record = json.loads((again.run_dir / "run.json").read_text())
    assert [(entry["from_step"], entry["status"]) for entry in record["launches"]] == [(0, "stopped"), (5, "finished")]


def test_checkpoints_are_pruned_but_not_the_one_resumed_from(workplace: Path) -> None:
    stopped = launch(workplace, train__stop_after="3 steps", checkpoint__keep="1")
    assert [step for step, _ in step_dirs(stopped.run_dir / "checkpoints")] == [3]
    done = launch(workplace, TrainOptions(resume="auto"), checkpoint__keep="1")
    assert [step for step, _ in step_dirs(done.run_dir / "checkpoints")] == [TOTAL, 3]


def test_evaluation_is_weighted_by_tokens_and_its_rows_are_bounded(workplace: Path) -> None:
    found = []
    for micro in ("1", "2"):
        flags = {"data__eval": "9 documents", "eval__max_rows": "5", "eval__samples": "1"}
        result = launch(workplace, name=f"micro{micro}", train__micro_batch_size=micro, **flags)
        evaluations = [line["loss"] for line in lines(result.run_dir) if line["kind"] == "eval"]
        assert len(evaluations) >= 2
        assert (result.run_dir / "samples.jsonl").is_file()
        found.append(evaluations[0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_failed_launch_says_so_and_can_go_on(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = GlobalBatches.step

    def failing(self: GlobalBatches, i: int) -> Any:
        if i == 6:
            raise OSError("the disk is gone")
        return real(self, i)

    monkeypatch.setattr(GlobalBatches, "step", failing)
    with pytest.raises(OSError, match="disk is gone"):
        launch(workplace)
    monkeypatch.undo()
    run = workplace / "runs" / "r"
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["launches"][0]["why"]) == ("failed", "OSError: the disk is gone")
    found = newest(run / "checkpoints")
    assert found is not None
    assert found.step == 4
    with pytest.raises(RecipeError, match="unfinished run, at step 4"):
        launch(workplace)
    assert launch(workplace, TrainOptions(resume="auto")).status == "finished"
    assert [line["step"] for line in lines(run)] == list(range(1, TOTAL + 1))
