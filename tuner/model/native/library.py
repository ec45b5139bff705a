"""The compiled kernels, loaded into this process."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from tuner.errors import MachineError
from tuner.runtime.compiled import compiled

SOURCES = Path(__file__).parent
_OPENMP = ("libgomp", "libiomp", "libomp")


@cache
def library() -> ctypes.CDLL:
    """The library; compiled for about a second where it is not there yet. Raises MachineError with the reason."""
    path = compiled(sorted(SOURCES.glob("*.c")), sorted(SOURCES.glob("*.h")))
    try:
        _share_openmp()
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(f"compiled kernels cannot be loaded: {error}", hint="write model.kernels: torch") from error


def native_problem() -> str | None:
    """Why this machine cannot have the compiled kernels; None where it can."""
    try:
        library()
    except MachineError as error:
        return str(error)
    return None


def threads() -> int:
    """So many threads work on an operation: as many as torch's own take."""
    return torch.get_num_threads()


def _share_openmp() -> None:
    """Let our library find the OpenMP that torch has loaded. Raises OSError where there is none."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line}):
        if Path(path).name.startswith(_OPENMP):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
    raise OSError("torch has loaded no OpenMP")
