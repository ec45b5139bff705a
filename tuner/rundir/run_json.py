"""The record of a run, `run.json`. Nothing here writes, or needs torch.

`run.json` holds `schema`, `status`, `run_id`, `launches` and, once the run is finished, its `metrics`; each launch its
`started`, `from_step`, and once it ended `ended`, `status`, `step`, `saved_step` and `why`. Where it is gone, what can
be known of the run is read from its checkpoints.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tuner.checkpoint.manifest import SEAL, STATE_NAME, read_manifest, step_dirs
from tuner.errors import DataError
from tuner.rundir.layout import CHECKPOINTS, LEFTOVERS, LOCK, METRICS, RECORD, RESOLVED_RECIPE
from tuner.runtime.files import MANIFEST_NAME, TMP_PREFIX, read_json
from tuner.runtime.lock import FileLock

T = TypeVar("T")
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
SCHEMA = "tuner.run/1"
"""The `schema` of `run.json`."""


def utc_now() -> str:
    """The time as records write it."""
    return time.strftime(TIME_FORMAT, time.gmtime())


def hold(path: Path) -> FileLock:
    """The lock that whoever trains in, or removes, a run directory holds."""
    return FileLock(path / LOCK, wait=False)


def other_contents(path: Path) -> list[str]:
    """What a directory without a record holds besides the leftovers of a launch that died before it wrote one."""
    others = [name for name in os.listdir(path) if name not in LEFTOVERS and not name.startswith(TMP_PREFIX)]
    return others or ([CHECKPOINTS] if step_dirs(path / CHECKPOINTS) else [])


def read_record(path: Path) -> dict[str, Any]:
    """The record of the run in directory `path`; where it is gone, what the checkpoints tell in place of it.

    Raises DataError where it is not one of this version.
    """
    if record_is_gone(path):
        return _record_from_checkpoints(path)
    try:
        record = read_json(path / RECORD)
    except DataError as error:
        raise DataError(error.message, hint=_written_again(path)) from error
    launches = record.get("launches")
    known = record.get("schema") == SCHEMA and isinstance(launches, list)
    if not known or not all(isinstance(launch, dict) for launch in launches or ()):
        raise DataError(
            f"{path / RECORD}: not a run record of this version ({record.get('schema')!r})", hint=_written_again(path)
        )
    return record


def read_noted(path: Path, schema: str, of: Callable[[dict[str, Any]], T], what: str) -> T:
    """What is made `of` a file of this schema in which a run notes what its checkpoints know, too. Raises DataError."""
    try:
        content = read_json(path)
        if content["schema"] != schema:
            raise DataError(f"{path}: not of this version (schema {content['schema']!r})")
        return of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {error!r} in it", hint=f"remove it: the checkpoints know the {what}, too") from error


def is_run(path: Path) -> bool:
    """Whether a directory holds a run: its record, or what else a run leaves."""
    return (path / RECORD).is_file() or record_is_gone(path)


def record_is_gone(path: Path) -> bool:
    """Whether a directory holds a run, begun and perhaps saved, but not its record."""
    if (path / RECORD).exists():
        return False
    steps = step_dirs(path / CHECKPOINTS)
    if (path / RESOLVED_RECIPE).is_file():
        return bool(steps) or (path / METRICS).is_file()
    return any((step / MANIFEST_NAME).is_file() for _, step in steps)


def _record_from_checkpoints(path: Path) -> dict[str, Any]:
    """A record in place of one that is gone: the same at every call while the checkpoints are the same."""
    recipe = path / RESOLVED_RECIPE
    known, state = (recipe.read_bytes() if recipe.is_file() else b""), dict[str, Any]()
    for _, step in step_dirs(path / CHECKPOINTS):
        try:
            known, state = read_manifest(step, verify=True)[SEAL].encode(), read_json(step / STATE_NAME)
            break
        except DataError:
            continue
    run_id = hashlib.sha256(known).hexdigest()[:16]
    launch = {"from_step": 0, "why": f"{RECORD} was gone"}
    resets = {"resets": state["resets"]} if state.get("resets") else {}
    return {"schema": SCHEMA, "status": "running", "run_id": run_id, "launches": [launch], **resets}


def _written_again(path: Path) -> str:
    return f"have it written again from the checkpoints: rm {path / RECORD} && tuner resume {path}"
