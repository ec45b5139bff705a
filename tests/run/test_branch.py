"""New runs that go on from a checkpoint of another one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines
from tuner.checkpoint.manifest import step_dirs
from tuner.data.batches import GlobalBatches
from tuner.errors import DataError, RecipeError

TOTAL = 6
"""Steps of a whole run."""


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
