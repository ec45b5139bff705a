"""Reading a checkpoint while its run goes on: who holds it keeps it from being pruned."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tuner.errors import DataError


class CheckpointHold:
    """A shared `flock` on a checkpoint's directory from now on, until it is released or its process ends.

    Raises DataError where the directory is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        with suppress(OSError):  # a file system without locks: pruning finds no lock, either
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let it be pruned; once is enough."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> CheckpointHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """Whether somebody on this machine, this process included, reads the checkpoint."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
