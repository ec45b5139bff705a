"""Which checkpoints of a run stay: the newest, those that are named, and those that somebody reads."""

import fcntl
import os
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from tuner.checkpoint.manifest import step_dirs
from tuner.rundir.last_checkpoint import problem_of
from tuner.runtime.files import discard_dir, opened, reading


class CheckpointHold(ExitStack):
    """A shared `flock` on a checkpoint's directory, which keeps it from being pruned while its run continues.

    It ends with its context, when it is closed, or with its process. Raises DataError where the directory is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with reading(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.callback(os.close, descriptor)
        with suppress(OSError):  # a file system without locks: pruning finds no lock, either
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Whether somebody on this machine, this process included, has a lock on a directory: reads it, or writes it."""
    with suppress(OSError), opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def prune(checkpoints_dir: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Keep the newest `keep` valid ones and those in `protect`; returns what was removed, newest first.

    Call it after a newer one is durable, on one rank. Each is renamed to a trash name before it is deleted; one that is
    being read waits for a later call. One that is invalid counts for nothing: it stays while it is newer than the
    oldest kept one, for people to look at. Raises MachineError.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    untouchable = {path.resolve() for path in protect}
    removed: list[Path] = []
    kept = 0
    for _, path in step_dirs(checkpoints_dir):
        if kept < keep:
            kept += problem_of(path) is None
        elif path.resolve() not in untouchable and not is_held(path):
            discard_dir(path)
            removed.append(path)
    return removed
