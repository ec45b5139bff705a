"""Records from elsewhere than files as a file: they are hashed first and read afterwards.

The file has no name, so that nothing of it is left however the process ends; its children reach it by the path, too.
"""

import atexit
import functools
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tuner.errors import DataError
from tuner.runtime.files import machine_errors

_COPY_BYTES = 1 << 20


@functools.cache
def spooled() -> Path:
    """Copy standard input to a file, once for the process. DataError for a terminal, MachineError."""
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("-: standard input is a terminal", hint="redirect a file or a pipe to it")
    return without_name(iter(lambda: sys.stdin.buffer.read(_COPY_BYTES), b""))


def without_name(lines: Iterable[bytes]) -> Path:
    """Write a file without a name; where it is for this process and its children. MachineError."""
    with machine_errors(Path(tempfile.gettempdir())):
        file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        try:
            file.writelines(lines)
            file.flush()
        except BaseException:
            file.close()
            raise
    atexit.register(file.close)
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
