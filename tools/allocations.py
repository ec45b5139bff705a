"""What torch's CPU allocator has given out, in all threads of this process, counted at the allocator itself.

The counter is a small library that stands before the allocator's two functions; it works in processes that are started
with the environment of :func:`preloaded`.
"""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COUNTER, LEVEL = "tuner_allocations", "tuner_allocated_now"


@dataclass(frozen=True)
class Allocated:
    """Bytes given out now, and the most of them since the last look."""

    level: int
    peak: int


def preloaded(directory: Path) -> dict[str, str]:
    """The environment of a process in which allocations are counted; the counter is compiled into a directory."""
    library = directory / "allocations.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("allocations are counted by a library that a C compiler makes; there is none here")
    command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def is_counted() -> bool:
    """Whether the counter stands before the allocator of this process."""
    return hasattr(ctypes.CDLL(None), COUNTER)


def allocated() -> Allocated:
    """Look at the counter, of which the peak begins anew."""
    found = (ctypes.c_int64 * 2)()
    getattr(ctypes.CDLL(None), COUNTER)(found)
    return Allocated(*found)


def level_now() -> int:
    """Bytes given out now; the peak goes on."""
    read = getattr(ctypes.CDLL(None), LEVEL)
    read.restype = ctypes.c_int64
    return int(read())
