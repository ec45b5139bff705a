"""Standard input as a file: it is hashed first and read afterwards.

The file goes with the process, and its lock does however the process ends: what a killed one left is told from what
somebody reads by that, and is removed by the next process that reads standard input, or by `tuner data gc`.
"""

import fcntl
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tuner.errors import DataError
from tuner.runtime.files import machine_error

_PREFIX = "tuner-stdin-"
_COPY_BYTES = 1 << 20


def spooled() -> Path:
    """Copy standard input to a file, once for the process. DataError for a terminal, MachineError."""
    return Path(_spool().name)


def remove_left_spools(dry_run: bool = False) -> list[tuple[Path, int]]:
    """Remove the files, with their sizes, of this user's processes that were killed; none with `dry_run`."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with _if_left(path) as size:
            if size is not None:
                removed.append((path, size))
                if not dry_run:
                    path.unlink(missing_ok=True)
    return removed


@contextmanager
def _if_left(path: Path) -> Iterator[int | None]:
    """The size of a file of this user that nobody holds, locked for the length of the block; None for others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield os.fstat(descriptor).st_size if _is_free(descriptor) else None
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Whether the lock of an open file of this user was free; it is taken."""
    if os.fstat(descriptor).st_uid != os.getuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@functools.cache
def _spool() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("-: standard input is a terminal", hint="redirect a file or a pipe to it")
    remove_left_spools()
    try:
        file = _locked()
        while block := sys.stdin.buffer.read(_COPY_BYTES):
            file.write(block)
        file.flush()
    except OSError as error:
        raise machine_error(Path(tempfile.gettempdir()), error) from error
    return file


def _locked() -> IO[bytes]:
    """A new file that is locked, and still there: another process may have found it before it was. OSError."""
    while True:
        file = tempfile.NamedTemporaryFile(prefix=_PREFIX)  # noqa: SIM115 (it lives as long as the process)
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
