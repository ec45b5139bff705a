"""Removing old checkpoints, after a newer one is durable."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tuner.checkpoint.load import open_checkpoint
from tuner.checkpoint.readers import is_held
from tuner.checkpoint.steps import step_dirs
from tuner.errors import DataError
from tuner.runtime.files import discard_dir


def prune(checkpoints_dir: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Keep those in `protect` and the newest `keep` valid others; returns what was removed, newest first.

    Each is renamed to a trash name before it is deleted; one that is being read waits for a later call. One that is
    invalid counts for nothing: it stays while it is newer than the oldest kept one, for people to look at. Call it on
    one rank. Raises MachineError.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    untouchable = {path.resolve() for path in protect}
    removed: list[Path] = []
    kept = 0
    for _, path in step_dirs(checkpoints_dir):
        if path.resolve() in untouchable:
            continue
        if kept >= keep:
            if not is_held(path):
                discard_dir(path)
                removed.append(path)
        elif _is_valid(path):
            kept += 1
    return removed


def _is_valid(path: Path) -> bool:
    try:
        open_checkpoint(path, verify=False)
    except DataError:
        return False
    return True
