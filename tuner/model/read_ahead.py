"""Files of weights that a launch will read, brought into the page cache while it is still planned."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tuner.errors import TunerError
from tuner.model.build import ModelSpec
from tuner.model.vetting import weight_files
from tuner.runtime.memory import host_memory

_BLOCK = 8 << 20


def begin_reading(spec: ModelSpec) -> None:
    """Have a thread read the files of a model's weights from now on, in the background.

    It takes no memory that is anyone's: the kernel may drop the pages again. Files of more than half of the memory that
    is free are left alone, since the first would be dropped for the last; so is what cannot be read, which the loader
    explains.
    """
    if spec.random_init or not hasattr(os, "RWF_NOWAIT"):
        return
    with suppress(OSError, TunerError):
        files = list(weight_files(spec.name_or_path, spec.revision))
        if sum(file.stat().st_size for file in files) <= host_memory()[1] // 2:
            threading.Thread(target=_read, args=(files,), name="read ahead", daemon=True).start()


def _read(files: Sequence[Path]) -> None:
    """Read each file whole, in order, but for blocks that the page cache has. (What posix_fadvise asks for ahead is cut
    to what a disk reads at once.)"""
    block = memoryview(bytearray(_BLOCK))
    for path in files:
        with suppress(OSError), path.open("rb", buffering=0) as file:
            for start in range(0, path.stat().st_size, _BLOCK):
                if not _is_cached(file.fileno(), start):
                    os.preadv(file.fileno(), [block], start)


def _is_cached(file: int, start: int) -> bool:
    """Whether the page cache has the byte at an offset; False where the file system cannot say."""
    try:
        return os.preadv(file, [bytearray(1)], start, os.RWF_NOWAIT) == 1
    except OSError:
        return False
