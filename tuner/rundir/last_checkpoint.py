"""Which checkpoint is a run's last, by its record and by what is there, and whether it is whole. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import STATE_NAME, step_dirs, step_name
from tuner.checkpoint.open import open_checkpoint
from tuner.errors import DataError
from tuner.rundir.layout import DAMAGED_CHECKPOINTS
from tuner.runtime.files import read_json


def last_step(checkpoints: Path, record: Mapping[str, Any] | None) -> int | None:
    """The step of the checkpoint that a run means by its last; None where none was ever saved.

    A launch that ended has noted the newest that it saved. After one that was killed it is the newest that is there,
    whole or not, and at least the one that the launch began with. `checkpoints` is the run's directory of them,
    `record` its `run.json`, None where that is gone.
    """
    launches = [] if record is None else record["launches"]
    newest = launches[-1] if launches else {}
    if "saved_step" in newest:
        return _step(newest["saved_step"])
    if newest.get("status") in ("finished", "stopped"):  # a record of a version that did not note it
        return _step(newest.get("step"))
    there = step_dirs(checkpoints)
    known = [there[0][0]] if there else []
    began = _step(newest.get("from_step"))
    from_another_run = bool(launches) and launches[0].get("began_from") and began == launches[0].get("from_step")
    if began and not from_another_run:
        known.append(began)
    return max(known, default=None)


def synced_step(checkpoints: Path, record: Mapping[str, Any]) -> int:
    """The step up to which metrics.jsonl was on the disk: before the last checkpoint committed, or its launch ended."""
    newest = record["launches"][-1] if record["launches"] else {}
    ended = _step(newest.get("step")) if newest.get("status") in ("finished", "stopped") else None
    return max(last_step(checkpoints, record) or 0, ended or 0)


def last_problem(checkpoints: Path, record: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a run's last checkpoint by its manifest, its files and their sizes; None where nothing is.

    No tensor is read: bits that changed inside a file are found by `tuner runs verify`, and by whoever loads it.
    """
    step = last_step(checkpoints, record)
    if step is None:
        return None
    path = dict(step_dirs(checkpoints)).get(step)
    if path is None:
        return gone(checkpoints, step)
    return problem_of(path)


def last_state(checkpoints: Path, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state in a run's last checkpoint; empty where that cannot be read."""
    step = last_step(checkpoints, record)
    try:
        return {} if step is None else read_json(checkpoints / step_name(step) / STATE_NAME)
    except DataError:
        return {}


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest, its files and their sizes; None where nothing is."""
    try:
        open_checkpoint(path, verify=False)
    except DataError as error:
        return error.message
    return None


def any_valid(checkpoints: Path) -> bool:
    """Whether some checkpoint is whole by its manifest, its files and their sizes."""
    return any(problem_of(path) is None for _, path in step_dirs(checkpoints))


def way_to_whole(checkpoints: Path, any_valid: bool) -> str:
    """What to type where a run's last checkpoint is not whole: from what is valid, else from the run's beginning.

    `tuner resume` begins at step 0 only where there is no checkpoint at all: one that is damaged might be mended.
    """
    run_dir = checkpoints.parent
    if any_valid or not step_dirs(checkpoints):
        return f"make it whole: tuner resume {run_dir}"
    aside = run_dir / DAMAGED_CHECKPOINTS
    return f"none is valid; begin at step 0: mv {checkpoints} {aside} && tuner resume {run_dir}"


def gone(checkpoints: Path, step: int) -> str:
    """What to say of a checkpoint that is not there."""
    return f"{checkpoints / step_name(step)}: no such directory"


def _step(value: object) -> int | None:
    return value if type(value) is int else None
