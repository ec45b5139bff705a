"""A run in several local processes is written down, and goes on, as one in this process is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.commands import git
from tuner.checkpoint import manifest
from tuner.config.load import load_recipe
from tuner.run.launch import launch
from tuner.run.options import JOB, LaunchOptions, RankJob, RunResult
from tuner.run.rank import train_rank
from tuner.runtime import spawn
from tuner.runtime.spawn import Work

COMMAND = ["/lib/tuner/__main__.py", "train", "work/r.yaml", "--hooks.0.options.token", "secret"]


def as_one_rank(work: Work, job: Mapping[str, Any], processes: int, logs: Path, says: str = "") -> dict[str, Any]:
    """Stands in for the ranks: one of them alone does the work, with a command line of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["/lib/worker.py", "/somewhere/job"])
        assert processes == 2
        result: dict[str, Any] = json.loads(json.dumps(work(json.loads(json.dumps(job)))))
        return result


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a git repository, which is not the working directory."""
    work = tmp_path / "work"
    work.mkdir()
    trainings.prepare(work, 1, layers=1)
    git(work, "init")
    git(work, "add", "r.yaml")
    git(work, "commit", "-m", "one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", COMMAND)
    monkeypatch.setattr(spawn, "run_ranks", as_one_rank)
    return work


def launched(work: Path, processes: int, resume: Any = "never", **flags: str) -> RunResult:
    given = {"name": f"p{processes}", "parallel.processes": str(processes), "train.device": "cpu"}
    given["train.duration"] = "5 steps"
    recipe = load_recipe(work / "r.yaml", trainings.overrides(given | flags))
    return launch(recipe, LaunchOptions(resume, level="error"))


def test_command_and_git_state_are_those_of_the_process_that_was_called(work: Path) -> None:
    (work / "r.yaml").write_text((work / "r.yaml").read_text() + "# changed\n")
    noted = []
    for processes in (1, 2):
        run = launched(work, processes, train__stop_after="1 steps").run_dir
        entry = trainings.record(run)["launches"][0]
        noted.append({key: entry[key] for key in ("command", "git")})
        assert (run / entry["git"]["diff"]).is_file()
    assert noted[0]["command"] == [*COMMAND[:-1], "***"]
    assert noted[0]["git"]["dirty"]
    assert noted[0] == noted[1]


def test_a_rank_knows_which_keys_are_written(work: Path) -> None:
    """On Ray each launch settles in its ranks what is not: such as a global batch that they divide."""
    loaded = load_recipe(work / "r.yaml", trainings.overrides({"optimizer.lr": "1e-3"}))
    job = JOB.validate_json(JOB.dump_json(RankJob.of(loaded, LaunchOptions())))
    assert (job.loaded().recipe, job.loaded().origins) == (loaded.recipe, loaded.origins)
    assert "optimizer.lr" in loaded.origins and "optimizer.kind" not in loaded.origins


def test_the_chosen_checkpoint_is_hashed_once_and_goes_to_every_rank(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launched(work, 2, train__stop_after="3 steps")
    real, hashed = manifest.verify_entries, []

    def counting(path: Path, entries: Any, hash: bool) -> None:
        hashed.append(hash)
        real(path, entries, hash=hash)

    monkeypatch.setattr(manifest, "verify_entries", counting)
    given: list[Any] = []

    def hand_over(_: Work, job: Any, *rest: Any) -> Any:
        given.append(job)
        assert hashed.count(True) == 1
        return train_rank(job)

    monkeypatch.setattr(spawn, "run_ranks", hand_over)
    result = launched(work, 2, "auto")
    assert given[0]["options"]["handed_over"]["checkpoint"] == str(first.checkpoint)
    assert (result.status, result.metrics["step"]) == ("finished", 5)
    assert trainings.record(result.run_dir)["launches"][1]["from_step"] == 3
    assert hashed.count(True) == 1
