"""A link at any name of a run directory is refused by whatever opens the run, and nothing is written through it.

So is a pipe, which would be waited for.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.rundir import layout
from tuner.rundir.checkpoints import link_latest
from tuner.rundir.directory import RunDir
from tuner.rundir.layout import require_no_links
from tuner.rundir.model_path import ignore_warning, resolve_model_path
from tuner.rundir.record import find_runs, read_run, remove_runs

BELOW = (
    "checkpoints/step-4", "exports/step-4", "exports/step-4-adapter", "launches/1", "launches/1/git.diff",
    "evaluations/step-4", "evaluations/step-4/a.jsonl", "logs/rank0.log", "logs/export.log", "logs/windows.log",
    "tokenizer/tokenizer.json", "model_config/config.json", "profile/trace.json", "prober/step-4",
    "trackers/wandb.json",
)  # fmt: skip
OPENED: dict[str, Callable[[Path], object]] = {
    "train, resume": lambda path: RunDir(path).read_record(),
    "runs show, plot, compare": read_run,
    "runs rm": lambda path: remove_runs([path]),
    "export-hf, eval, generate": lambda path: resolve_model_path(path, ignore_warning),
    "a checkpoint": lambda path: resolve_model_path(path / "checkpoints" / "step-8", ignore_warning),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "a"
    (run / "checkpoints" / "step-8").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"schema": "tuner.run/1", "status": "running", "launches": []}))
    return run


def planted(run: Path, name: str) -> Path:
    """A link at a name, in place of what is there."""
    outside = run.parents[1] / "outside"
    outside.mkdir()
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    target = outside
    if link.exists():
        target = link.rename(outside / link.name)
    link.symlink_to(target)
    return link


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("name", sorted({*layout.NAMES, *BELOW}))
def test_a_link_is_refused_by_its_name(run: Path, name: str, opened: str) -> None:
    link = planted(run, name)
    with pytest.raises(DataError, match=re.escape(f"{link}: a link, to ")):
        OPENED[opened](run)
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "logs/rank0.log", "evaluations/step-4"])
def test_a_pipe_is_refused_before_it_is_opened(run: Path, name: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(DataError, match=re.escape(f"{run / name}: neither a file nor a directory")):
        require_no_links(run)


def test_the_link_to_the_newest_export_is_a_runs_own(run: Path) -> None:
    (run / "exports" / "step-8").mkdir(parents=True)
    link_latest(run / "exports", "step-8")
    require_no_links(run)
    (run / "exports" / "latest").unlink()
    (run / "exports" / "latest").symlink_to("../../outside")
    with pytest.raises(DataError, match="exports/latest: a link"):
        require_no_links(run)


def test_a_run_with_a_link_is_told_of_in_a_list(run: Path) -> None:
    planted(run, "metrics.jsonl")
    assert find_runs(run.parent) == ([], [str(pytest.raises(DataError, read_run, run).value.message)])


def test_other_names_are_the_users(run: Path) -> None:
    (run / "wandb").symlink_to(run.parent)
    require_no_links(run)
