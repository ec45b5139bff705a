"""A lock on a path that dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tuner.errors import MachineError
from tuner.runtime.environment import command_line
from tuner.runtime.files import machine_errors, opened, write_all


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file `path`; it is neither made nor written to. False where it cannot be read."""
    with suppress(OSError), opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD
    return False


_HELD, _NO_LOCKS = (errno.EWOULDBLOCK, errno.EACCES), (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FileLock:
    """An exclusive `flock` on a file, which is created, filled with the holder's name and never removed.

    As a context manager it waits for the lock unless built with `wait=False`. Raises MachineError.
    """

    def __init__(self, path: Path, wait: bool = True, on_wait: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._wait = wait
        self._on_wait = on_wait
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self, wait: bool) -> None:
        """Take the lock; without `wait`, a lock held elsewhere raises MachineError naming the holder.

        When it has to wait, `on_wait` is called once, with the holder's name.
        """
        if self._descriptor is not None:
            raise RuntimeError(f"{self.path}: locked twice by one holder")
        with machine_errors(self.path), ExitStack() as failing:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            failing.callback(os.close, descriptor)
            try:
                self._lock(descriptor, wait)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise MachineError(
                    f"{self.path.parent}: its file system has no locks ({error.strerror})",
                    hint="choose a directory on another file system, such as a local disk (output_dir, data.cache_dir)",
                ) from error
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(command_line())}
            write_all(descriptor, (json.dumps(holder) + "\n").encode())
            failing.pop_all()
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; without holding it, nothing happens."""
        if self._descriptor is None:
            return
        # Unlock before closing: a forked child may still share the open file, and with it the lock.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with suppress(OSError):  # what the file holds is for people, and the work that it guarded is done
            os.close(self._descriptor)
        self._descriptor = None

    def holder(self) -> str:
        """The holder as `process 123 on host (command)`, as far as the file tells."""
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            return f"process {int(facts['pid'])} on {facts['host']!s} ({facts['command']!s})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def __enter__(self) -> FileLock:
        self.acquire(self._wait)
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _lock(self, descriptor: int, wait: bool) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD:
                raise
        if not wait:
            said = f"{self.path.parent} is in use by {self.holder()}"
            raise MachineError(said, hint="wait for it, or stop it with Ctrl-C")
        if self._on_wait is not None:
            self._on_wait(self.holder())
        fcntl.flock(descriptor, fcntl.LOCK_EX)
