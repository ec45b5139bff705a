"""New runs that continue from a checkpoint of another one; and parts of a run that begin afresh: once, where they were
asked for, and in every launch after it.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import CheckpointInfo
from tuner.data.batches import GlobalBatches
from tuner.errors import DataError, RecipeError
from tuner.run.changes import Reset, parse_reset, resets_for
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import resume_source
from tuner.run.verify import verify_resume
from tuner.runtime.console import Console
from tuner.train import loop

TOTAL = 6
"""Steps of the whole run."""


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at its third step; what becomes of it is put back."""
    directory = trainings.prepare(tmp_path_factory.mktemp("cut"), 1, layers=1)
    trainings.edit(directory, ("3 epochs", f"{TOTAL} steps"))
    launch(directory, train__stop_after="3 steps", checkpoint__every="never", checkpoint__keep="9")
    shutil.copytree(directory / "runs", directory / "stopped")
    return directory


@pytest.fixture
def place(cut: Path) -> Path:
    shutil.rmtree(cut / "runs")
    shutil.copytree(cut / "stopped", cut / "runs")
    return cut


def resumed(place: Path, reset: str | None = None, **flags: str) -> RunResult:
    loaded = resume_source(place / "runs" / "r", trainings.overrides(flags))
    return trainings.trained(loaded, LaunchOptions("must", reset=parse_reset(reset)))


def state(place: Path) -> dict[str, Any]:
    return trainings.saved(place / "runs" / "r").state


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
    place: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    plain = trainings.outcome(resumed(place).run_dir)
    ended = []
    for _ in range(2):
        shutil.rmtree(place / "runs" / "r")
        shutil.copytree(place / "stopped" / "r", place / "runs" / "r")
        if not ended:
            resumed(place, word)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "optimizer_step", _no_step)
                with pytest.raises(KeyError):
                    resumed(place, word)  # ends before it saved anything
            resumed(place, train__stop_after="1 step")
            resumed(place)
        ended.append(trainings.outcome(place / "runs" / "r"))
    assert ended[0] == ended[1]
    assert ended[0]["sha256"] != plain["sha256"]
    parts = sorted(parse_reset(word))
    assert state(place)["resets"] == [{"step": 3, "parts": parts, "updates": 3}]
    assert trainings.record(place / "runs" / "r")["resets"] == state(place)["resets"]
    assert [line["step"] for line in lines(place / "runs" / "r")] == list(range(1, TOTAL + 1))


def _no_step(*_: Any) -> Any:
    raise KeyError("killed")


def test_a_reset_schedule_runs_over_the_steps_that_are_left(place: Path) -> None:
    flags = {"schedule__kind": "linear", "schedule__warmup": "50%", "schedule__min_lr_ratio": "0.5"}
    with pytest.raises(RecipeError, match="schedule.kind cosine -> linear"):
        resumed(place, **flags)
    resumed(place, "schedule", train__duration="9 steps", **flags)
    rates = [line["lr"] for line in lines(place / "runs" / "r")][3:]
    assert len(rates) == 6
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
    assert rates[-1] == pytest.approx(0.5e-3)
    assert "duration: 9 steps" in (place / "runs" / "r" / "recipe.resolved.yaml").read_text()


def test_a_finished_run_goes_on_where_its_schedule_is_reset_and_longer(place: Path) -> None:
    resumed(place)
    longer = resumed(place, "schedule", train__duration="8 steps")
    assert (longer.status, longer.step) == ("finished", 8)
    assert resumed(place) == longer
    with pytest.raises(RecipeError, match="no steps of 8 are left"):
        resumed(place, "schedule")


def test_state_and_arguments_of_the_optimizer_apart(place: Path) -> None:
    with pytest.raises(RecipeError, match="optimizer.lr"):
        resumed(place, optimizer__lr="5e-4")
    others = ("betas", "eps", "state", "rounding", "offload")
    other = {"optimizer__kind": "sgd", "optimizer__lr": "5e-4", **{f"optimizer__{key}": "null" for key in others}}
    with pytest.raises(RecipeError, match="the state of adamw is none of sgd"):
        resumed(place, "optimizer.arguments", **other)
    before = _tensors(place)
    resumed(place, "optimizer.arguments", optimizer__lr="1e-12", train__stop_after="1 step")
    kept = _tensors(place)
    assert lines(place / "runs" / "r")[3]["lr"] < 1e-12
    name = next(name for name in before if "exp_avg_sq" in name and before[name].any())
    assert (kept[name] >= 0.94 * before[name]).all()  # 0.95 of what was there before the step
    resumed(place, "optimizer", train__stop_after="1 step", **other)
    assert not any("exp_avg" in name for name in _tensors(place))
    done = resumed(place)
    assert done.status == "finished"
    assert [reset["step"] for reset in state(place)["resets"]] == [3, 4]


def _tensors(place: Path) -> dict[str, Any]:
    return dict(read_tensors(trainings.saved(place / "runs" / "r")))


def test_reset_data_begin_again_and_may_be_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = GlobalBatches.step
    monkeypatch.setattr(GlobalBatches, "step", lambda self, i: asked.append(i) or real(self, i))
    rows = (place / "rows.jsonl").read_text().replace("ab", "ba")
    (place / "others.jsonl").write_text(rows)
    others = {"data__train": str(place / "others.jsonl")}
    with pytest.raises(RecipeError, match="data.train"):
        resumed(place, **others)
    asked.clear()
    resumed(place, "data", train__stop_after="1 step", **others)
    assert asked[:1] == [0]
    asked.clear()
    assert resumed(place).status == "finished"
    assert asked == list(range(1, TOTAL - 3))
    assert lines(place / "runs" / "r")[3]["epoch"] == pytest.approx(1 / 6, abs=1e-6)


@pytest.mark.slow
def test_a_branch_may_be_reset_and_its_origin_stays(place: Path) -> None:
    origin = place / "runs" / "r" / "checkpoints" / "step-3"
    options = LaunchOptions(origin, reset=parse_reset("schedule,optimizer"))
    branch = launch(place, options, name="branch", optimizer__lr="5e-4")
    record = trainings.record(branch.run_dir)
    parts = ["optimizer.arguments", "optimizer.state", "schedule"]
    assert record["resets"] == [{"step": 3, "parts": parts, "updates": 3}]
    assert max(line["lr"] for line in lines(branch.run_dir)) == pytest.approx(5e-4)
    assert "resets" not in trainings.record(place / "runs" / "r")
    proof = verify_resume(branch.run_dir, 1, Console(main=False), own_process=False)
    assert proof.from_step > 3


def test_what_cannot_be_reset_is_refused(place: Path) -> None:
    with pytest.raises(RecipeError, match="needs a run to resume"):
        launch(place, LaunchOptions(reset=("data",)))
    with pytest.raises(RecipeError, match="no checkpoint to resume from"):
        launch(place, LaunchOptions("auto", reset=("data",)), name="new")
    found = CheckpointInfo(Path("step-6"), 6, {}, {"step": 6, "guard": {"skipped": 1}})
    record = {"resets": [Reset(4, ("rng",), 4).as_state(), Reset(8, ("data",), 7).as_state()]}
    with pytest.raises(DataError, match=r"the run was reset at step 8 \(data\)"):
        resets_for(record, found, ())
    assert resets_for(record, found, ("rng",)) == (Reset(4, ("rng",), 4), Reset(6, ("rng",), 5))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run, `whole`, has ended."""
    directory = trainings.prepare(tmp_path_factory.mktemp("begun"), 1, layers=1)
    trainings.edit(directory, ("3 epochs", f"{TOTAL} steps"), ("every: 4 steps", "every: 2 steps"))
    launch(directory, name="whole")
    return directory


@pytest.fixture
def workplace(begun: Path) -> Path:
    """Without the runs of the test before."""
    for run in (begun / "runs").iterdir():
        if run.name != "whole":
            shutil.rmtree(run)
    return begun


def steps(run: Path) -> list[int]:
    return sorted(step for step, _ in step_dirs(run / "checkpoints"))


def same_from(run: Path, whole: Path, step: int) -> bool:
    """Whether a run that began at `step` ended as the unbroken one did."""
    ended, wanted = trainings.outcome(run), trainings.outcome(whole)
    assert len(wanted["log"]) == TOTAL
    return ended["sha256"] == wanted["sha256"] and ended["log"] == wanted["log"][step:]


def test_a_branch_ends_as_its_origin_does_and_leaves_it_alone(workplace: Path) -> None:
    whole = workplace / "runs" / "whole"
    origin = whole / "checkpoints" / "step-4"
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    branch = launch(workplace, origin, name="branch", checkpoint__keep="1")
    assert (branch.status, branch.step) == ("finished", TOTAL)
    assert same_from(branch.run_dir, whole, 4)
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before
    record = trainings.record(branch.run_dir)
    assert [(entry["from_step"], entry["began_from"]) for entry in record["launches"]] == [(4, str(origin))]
    assert launch(workplace, origin, name="branch").status == "finished"


def test_a_branch_that_stops_has_a_checkpoint_and_the_same_line_goes_on(workplace: Path) -> None:
    stopped = launch(workplace, name="origin", train__stop_after="3 steps").run_dir
    for limit in ("1 step", "never"):
        result = launch(workplace, stopped, name="branch", train__stop_after=limit)
        assert (result.run_dir / "checkpoints" / f"step-{result.step}").is_dir()
    assert result.status == "finished"
    assert steps(stopped) == [2, 3]
    assert same_from(result.run_dir, workplace / "runs" / "whole", 3)


@pytest.mark.slow
def test_a_branch_that_failed_before_it_saved_begins_where_it_began(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = launch(workplace, name="origin", train__stop_after="3 steps").run_dir

    def failing(*_: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk is gone"):
        patch.setattr(GlobalBatches, "step", failing)
        launch(workplace, origin, name="branch")
    assert steps(workplace / "runs" / "branch") == []
    result = launch(workplace, "auto", name="branch")
    assert [line["step"] for line in lines(result.run_dir)] == list(range(4, TOTAL + 1))
    assert same_from(result.run_dir, workplace / "runs" / "whole", 3)


def test_what_cannot_be_gone_on_from_is_refused(workplace: Path) -> None:
    whole = workplace / "runs" / "whole"
    origin = whole / "checkpoints" / "step-4"
    for path, more, message in (
        (workplace / "none", {}, "none: no such directory"),
        (whole, {}, "no steps are left"),
        (origin, {"optimizer__lr": "1e-4"}, r"another recipe \(optimizer.lr 0.001 -> 0.0001\)"),
    ):
        with pytest.raises(RecipeError, match=message):
            launch(workplace, path, name="branch", **more)
    with pytest.raises(RecipeError, match="did not begin from"):
        launch(workplace, origin, name="whole")
    damaged = shutil.copytree(whole, workplace / "runs" / "damaged") / "checkpoints" / "step-4"
    (damaged / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"step-4.state.json"):
        launch(workplace, damaged, name="branch")
    assert not (workplace / "runs" / "branch").exists()
