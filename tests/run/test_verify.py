"""Proof that a run goes on exactly, and that a run that does not is found out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch
from tuner.errors import MachineError, RecipeError, VerificationError
from tuner.run import main as run_module
from tuner.run import verify
from tuner.run.options import LaunchOptions
from tuner.run.parts.part import LaunchContext
from tuner.run.verify import ResumeProof, verify_resume
from tuner.runtime.console import Console
from tuner.runtime.lock import FileLock

SILENT = Console(main=False)
FLAGS = {"data__eval": "7 documents", "eval__samples": "0", "train__duration": "7 steps"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no proof changes."""
    place = trainings.prepare(tmp_path_factory.mktemp("finished"), 1, layers=1)
    return launch(place, eval__every="5 steps", **FLAGS, checkpoint__every="3 steps").run_dir


def proof(run: Path, steps: int) -> ResumeProof:
    return verify_resume(run, steps, SILENT, own_process=False)


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.slow
def test_steps_are_compared_behind_a_checkpoint_or_from_the_beginning(finished: Path) -> None:
    before = files(finished)
    short = proof(finished, 1)
    assert (short.from_step, short.steps) == (3, 2)
    long = proof(finished, 3)
    assert (long.from_step, long.steps) == (0, 6)
    assert long.sha256 != short.sha256
    assert long.tensors == short.tensors > 4
    assert files(finished) == before
    assert not list((finished / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_a_branch_begins_where_it_began(finished: Path) -> None:
    options = LaunchOptions(resume=finished / "checkpoints" / "step-3")
    branch = launch(finished.parents[1], options, name="branch", **FLAGS, checkpoint__every="never").run_dir
    assert proof(branch, 2).from_step == 3


def test_what_a_resume_loses_is_named(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_module.restore

    def forgets(context: LaunchContext, found: Any) -> None:
        real(context, found)
        context.assembly.train_state.optimizer.set_step_count(0)

    monkeypatch.setattr(run_module, "restore", forgets)
    with pytest.raises(VerificationError, match=r"without: step 7: \w+ .*, .* with a stop"):
        proof(finished, 2)
    with pytest.raises(VerificationError, match=r"without: \S*lora\S* after step 5$"):
        proof(finished, 1)
    monkeypatch.undo()

    def miscounts(context: LaunchContext, found: Any) -> None:
        real(context, found)
        context.progress.trained_tokens += 1

    monkeypatch.setattr(run_module, "restore", miscounts)
    with pytest.raises(VerificationError, match="state after step 5: trained_tokens"):
        proof(finished, 1)
    assert not list((finished / "checkpoints").glob(".tmp-*"))


def test_what_cannot_be_compared_is_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="fewer than 40 steps are left"):
        proof(finished, 20)
    with FileLock(finished / "lock"), pytest.raises(MachineError):
        proof(finished, 1)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="starts its processes itself"):
        proof(finished, 1)


def test_on_cuda_the_steps_are_compared_with_deterministic_kernels(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_source, real_launch, asked = verify.resume_source, verify.launch, []

    def placed(loaded: Any, where: str) -> Any:
        train = loaded.recipe.train.model_copy(update={"device": where})
        return replace(loaded, recipe=loaded.recipe.model_copy(update={"train": train}))

    def here(loaded: Any, options: LaunchOptions, own_process: bool) -> Any:
        asked.append(loaded.recipe.train.deterministic)
        return real_launch(placed(loaded, "cpu"), options, own_process)

    monkeypatch.setattr(verify, "launch", here)
    monkeypatch.setattr(verify, "resume_source", lambda run: placed(real_source(run), "cuda"))
    verify_resume(finished, 1, Console(), own_process=False)
    assert asked == [True] * 3
    assert "with train.deterministic: true" in capsys.readouterr().err
    assert [verify.is_made_deterministic(device) for device in ("cuda", "cpu", "auto")] == [True, False, False]
    assert "train.deterministic" not in verify._hint(True), "a hint names nothing that is set"
    assert "train.deterministic: true" in verify._hint(False)
