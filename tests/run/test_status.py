"""A run that is finished is told so before torch is loaded, and only where every byte of its end is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import forked
from tests.fixtures.trainings import launch
from tuner.config.load import LoadedRecipe, Override
from tuner.errors import DataError, RecipeError
from tuner.run.changes import parse_reset
from tuner.run.options import LaunchOptions
from tuner.run.status import resume_source, status_of
from tuner.runtime.console import Console

QUIET = Console(main=False)
CODE = """
import sys
from pathlib import Path
from tuner.run.options import LaunchOptions
from tuner.run.status import resume_source, status_of
from tuner.runtime.console import Console
found = status_of(resume_source(Path(sys.argv[1])), LaunchOptions("must"), Console()).finished
print(found.step, "torch" in sys.modules)
"""


def warned_of(loaded: LoadedRecipe, options: LaunchOptions, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert status_of(loaded, options, Console()).finished is not None
    return capsys.readouterr().err


def test_a_finished_run_is_told_without_torch(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = workplace / "runs" / "r"
    launch(workplace, train__duration="2 steps", train__stop_after="1 step")
    assert status_of(resume_source(run), LaunchOptions("must"), QUIET).finished is None
    with pytest.raises(RecipeError, match="another recipe"):
        status_of(resume_source(run, [Override("optimizer.lr", "1e-9")]), LaunchOptions("must"), QUIET)
    ended = launch(workplace, "must", train__duration="2 steps")
    loaded, must = resume_source(run), LaunchOptions("must")
    assert status_of(loaded, must, QUIET).finished == ended == launch(workplace, train__duration="2 steps")
    assert status_of(loaded, LaunchOptions("must", reset=("schedule",)), QUIET).finished is None
    with pytest.raises(RecipeError, match="did not begin from"):
        status_of(loaded, LaunchOptions(run), QUIET)
    longer = resume_source(run, [Override("train.duration", "3 steps")])
    with pytest.raises(RecipeError, match="train.duration 2 steps -> 3 steps") as refused:
        status_of(longer, must, QUIET)
    hint = f"change it in this run: add --reset schedule      start another run: tuner train {workplace / 'r.yaml'} "
    assert (refused.value.hint or "").startswith(hint)
    with pytest.raises(RecipeError) as refused:
        launch(workplace, train__duration="3 steps")
    assert refused.value.hint == (
        "change it in this run: add --resume must --reset schedule      start another run: --name NEW-NAME"
    )

    rows = Path(loaded.recipe.data.train[0].path)
    before = rows.stat()
    assert "modified after" not in warned_of(loaded, must, capsys)
    os.utime(rows, (before.st_atime, before.st_mtime + 3600))
    assert f"{rows}: modified after this run started; what changed since is not trained on." in " ".join(
        warned_of(loaded, must, capsys).split()
    )
    text = rows.read_bytes()
    rows.write_bytes(text + text.splitlines(keepends=True)[0].replace(b"a", b"b"))
    with pytest.raises(DataError, match=f"the data of {rows} changed since this checkpoint was saved") as changed:
        launch(workplace, LaunchOptions("must", reset=parse_reset("schedule")), train__duration="3 steps")
    assert "--reset schedule,data;" in (changed.value.hint or "")
    rows.write_bytes(text)
    os.utime(rows, (before.st_atime, before.st_mtime))

    command = [sys.executable, "-c", CODE, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(forked.ROOT)})
    assert done.stdout == "2 False\n"
    assert "is already trained: 2 steps" in done.stderr

    shard = next((run / "checkpoints" / "step-2").glob("rank-*"))
    whole = shard.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    shard.write_bytes(data)
    assert status_of(loaded, must, QUIET).finished is None, "a flipped bit: trained again"
    shard.write_bytes(whole)
    again = LaunchOptions("must", reset=parse_reset("schedule"))
    assert launch(workplace, again, train__duration="3 steps").step == 3, "what the hint says does it"


def test_a_checkpoint_that_could_not_be_restored_is_still_the_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be by another version of the model's code; the version that wrote it reads it."""
    from tuner.run import main
    from tuner.rundir.model_path import find_checkpoint, ignore_warning

    run = launch(workplace, name="kept", train__stop_after="2 steps").run_dir

    def unfit(*given: object) -> None:
        raise DataError("does not hold this model's state")

    with monkeypatch.context() as patch, pytest.raises(DataError, match="does not hold"):
        patch.setattr(main, "restore", unfit)
        launch(workplace, "must", name="kept")
    found = find_checkpoint(run, ignore_warning)
    assert found is not None and found.checkpoint.step == 2
    assert launch(workplace, "must", name="kept", train__stop_after="1 step").step == 3
