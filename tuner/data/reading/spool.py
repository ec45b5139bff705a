"""Standard input as a file: it is hashed first and read afterwards.

The file goes with the process, and its lock does however the process ends: what a killed one left is told from what
somebody reads by that, and is removed by the next process that reads standard input, or by `tuner data gc`.
"""

import fcntl
import functools
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from tuner.errors import DataError
from tuner.runtime.files import machine_error
from tuner.runtime.stop import undone

_PREFIX = "tuner-stdin-"
_COPY_BYTES = 1 << 20


def spooled() -> Path:
    """Copy standard input to a file, once for the process. DataError for a terminal, MachineError."""
    return Path(_spool().name)


def remove_left_spools(dry_run: bool = False) -> list[tuple[Path, int]]:
    """Remove the files, with their sizes, of this user's processes that were killed; none with `dry_run`."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with suppress(OSError), open(path, "rb", opener=_open_own) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where somebody holds it
            if not dry_run:
                path.unlink(missing_ok=True)
            removed.append((path, os.fstat(file.fileno()).st_size))
    return removed


def _open_own(path: str, flags: int) -> int:
    """Open a file of this user, never waiting and never through a link. OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(path)
    return descriptor


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
            undone(file.close).__enter__()  # as long as the process lives
            return file
