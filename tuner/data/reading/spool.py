"""Standard input as a file: it is hashed first and read afterwards.

The file has no name, so that nothing of it is left however the process ends; its children reach it by the path, too.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

from tuner.errors import DataError
from tuner.runtime.files import machine_error

_COPY_BYTES = 1 << 20


def spooled() -> Path:
    """Copy standard input to a file, once for the process. DataError for a terminal, MachineError."""
    return Path(f"/proc/{os.getpid()}/fd/{_spool().fileno()}")


@functools.cache
def _spool() -> IO[bytes]:
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("-: standard input is a terminal", hint="redirect a file or a pipe to it")
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        while block := sys.stdin.buffer.read(_COPY_BYTES):
            file.write(block)
        file.flush()
    except OSError as error:
        raise machine_error(Path(tempfile.gettempdir()), error) from error
    return file
