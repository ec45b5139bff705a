"""Parts of a run that begin anew: once, where they were asked for, and in every launch after it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import CheckpointInfo
from tuner.data.batches import GlobalBatches
from tuner.errors import DataError, RecipeError
from tuner.run.changes import Reset, parse_reset, resets_for
from tuner.run.main import train
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import resume_source
from tuner.run.verify import verify_resume
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.train import loop

TOTAL = 6
"""Steps of the whole run."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at its third step; what becomes of it is put back."""
    directory = trainings.prepare(tmp_path_factory.mktemp("begun"), 1, layers=1)
    trainings.edit(directory, ("3 epochs", f"{TOTAL} steps"))
    launch(directory, train__stop_after="3 steps", checkpoint__every="never", checkpoint__keep="9")
    shutil.copytree(directory / "runs", directory / "stopped")
    return directory


@pytest.fixture
def workplace(begun: Path) -> Path:
    shutil.rmtree(begun / "runs")
    shutil.copytree(begun / "stopped", begun / "runs")
    return begun


def resumed(workplace: Path, reset: str | None = None, **flags: str) -> RunResult:
    loaded = resume_source(workplace / "runs" / "r", trainings.overrides(flags))
    return train(loaded, LaunchOptions("must", reset=parse_reset(reset)), RankInfo(), Console(main=False))


def state(workplace: Path) -> dict[str, Any]:
    return trainings.saved(workplace / "runs" / "r").state


def test_words_are_parts_and_others_are_refused() -> None:
    assert parse_reset("optimizer, data") == ("data", "optimizer.arguments", "optimizer.state")
    assert parse_reset(None) == ()
    with pytest.raises(RecipeError, match="--reset 'shedule': not one of .*; did you mean schedule"):
        parse_reset("shedule")


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("optimizer.state", marks=pytest.mark.slow),
        pytest.param("rng", marks=pytest.mark.slow),
        "optimizer,schedule,data,rng",
    ],
)
def test_a_reset_run_that_is_killed_or_stopped_goes_on_with_the_same_bits(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    plain = trainings.outcome(resumed(workplace).run_dir)
    ended = []
    for _ in range(2):
        shutil.rmtree(workplace / "runs" / "r")
        shutil.copytree(workplace / "stopped" / "r", workplace / "runs" / "r")
        if not ended:
            resumed(workplace, word)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "optimizer_step", _no_step)
                with pytest.raises(KeyError):
                    resumed(workplace, word)  # ends before it saved anything
            resumed(workplace, train__stop_after="1 step")
            resumed(workplace)
        ended.append(trainings.outcome(workplace / "runs" / "r"))
    assert ended[0] == ended[1]
    assert ended[0]["sha256"] != plain["sha256"]
    parts = sorted(parse_reset(word))
    assert state(workplace)["resets"] == [{"step": 3, "parts": parts, "updates": 3}]
    assert trainings.record(workplace / "runs" / "r")["resets"] == state(workplace)["resets"]
    assert [line["step"] for line in lines(workplace / "runs" / "r")] == list(range(1, TOTAL + 1))


def _no_step(*_: Any) -> Any:
    raise KeyError("killed")


def test_a_reset_schedule_runs_over_the_steps_that_are_left(workplace: Path) -> None:
    flags = {"schedule__kind": "linear", "schedule__warmup": "50%", "schedule__min_lr_ratio": "0.5"}
    with pytest.raises(RecipeError, match="schedule.kind cosine -> linear"):
        resumed(workplace, **flags)
    resumed(workplace, "schedule", train__duration="9 steps", **flags)
    rates = [line["lr"] for line in lines(workplace / "runs" / "r")][3:]
    assert len(rates) == 6
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[-1] == pytest.approx(0.5e-3)
    assert "duration: 9 steps" in (workplace / "runs" / "r" / "recipe.resolved.yaml").read_text()


def test_a_finished_run_goes_on_where_its_schedule_is_reset_and_longer(workplace: Path) -> None:
    resumed(workplace)
    longer = resumed(workplace, "schedule", train__duration="8 steps")
    assert (longer.status, longer.step) == ("finished", 8)
    assert resumed(workplace) == longer
    with pytest.raises(RecipeError, match="no steps of 8 are left"):
        resumed(workplace, "schedule")


def test_state_and_arguments_of_the_optimizer_apart(workplace: Path) -> None:
    with pytest.raises(RecipeError, match="optimizer.lr"):
        resumed(workplace, optimizer__lr="5e-4")
    others = ("betas", "eps", "state", "rounding", "offload")
    other = {"optimizer__kind": "sgd", "optimizer__lr": "5e-4", **{f"optimizer__{key}": "null" for key in others}}
    with pytest.raises(RecipeError, match="the state of adamw is none of sgd"):
        resumed(workplace, "optimizer.arguments", **other)
    before = _tensors(workplace)
    resumed(workplace, "optimizer.arguments", optimizer__lr="1e-12", train__stop_after="1 step")
    kept = _tensors(workplace)
    assert lines(workplace / "runs" / "r")[3]["lr"] < 1e-12
    name = next(name for name in before if "exp_avg_sq" in name and before[name].any())
    assert (kept[name] >= 0.94 * before[name]).all()  # 0.95 of what was there before the step
    resumed(workplace, "optimizer", train__stop_after="1 step", **other)
    assert not any("exp_avg" in name for name in _tensors(workplace))
    done = resumed(workplace)
    assert done.status == "finished"
    assert [reset["step"] for reset in state(workplace)["resets"]] == [3, 4]


def _tensors(workplace: Path) -> dict[str, Any]:
    return dict(read_tensors(trainings.saved(workplace / "runs" / "r")))


def test_reset_data_begin_again_and_may_be_others(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = GlobalBatches.step
    monkeypatch.setattr(GlobalBatches, "step", lambda self, i: asked.append(i) or real(self, i))
    rows = (workplace / "rows.jsonl").read_text().replace("ab", "ba")
    (workplace / "others.jsonl").write_text(rows)
    others = {"data__train": str(workplace / "others.jsonl")}
    with pytest.raises(RecipeError, match="data.train"):
        resumed(workplace, **others)
    asked.clear()
    resumed(workplace, "data", train__stop_after="1 step", **others)
    assert asked[:1] == [0]
    asked.clear()
    assert resumed(workplace).status == "finished"
    assert asked == list(range(1, TOTAL - 3))
    assert lines(workplace / "runs" / "r")[3]["epoch"] == pytest.approx(1 / 6, abs=1e-6)


@pytest.mark.slow
def test_a_branch_may_be_reset_and_its_origin_stays(workplace: Path) -> None:
    origin = workplace / "runs" / "r" / "checkpoints" / "step-3"
    options = LaunchOptions(origin, reset=parse_reset("schedule,optimizer"))
    branch = launch(workplace, options, name="branch", optimizer__lr="5e-4")
    record = trainings.record(branch.run_dir)
    parts = ["optimizer.arguments", "optimizer.state", "schedule"]
    assert record["resets"] == [{"step": 3, "parts": parts, "updates": 3}]
    assert max(line["lr"] for line in lines(branch.run_dir)) == pytest.approx(5e-4)
    assert "resets" not in trainings.record(workplace / "runs" / "r")
    proof = verify_resume(branch.run_dir, 1, Console(main=False), own_process=False)
    assert proof.from_step > 3


def test_what_cannot_be_reset_is_refused(workplace: Path) -> None:
    with pytest.raises(RecipeError, match="needs a run to resume"):
        launch(workplace, LaunchOptions(reset=("data",)))
    with pytest.raises(RecipeError, match="no checkpoint to resume from"):
        launch(workplace, LaunchOptions("auto", reset=("data",)), name="new")
    found = CheckpointInfo(Path("step-6"), 6, {}, {"step": 6, "guard": {"skipped": 1}})
    record = {"resets": [Reset(4, ("rng",), 4).as_state(), Reset(8, ("data",), 7).as_state()]}
    with pytest.raises(DataError, match=r"the run was reset at step 8 \(data\)"):
        resets_for(record, found, ())
    assert resets_for(record, found, ("rng",)) == (Reset(4, ("rng",), 4), Reset(6, ("rng",), 5))
