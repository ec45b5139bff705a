"""What libraries read from the environment when they are loaded, settled before torch is imported."""

import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

SPIN_COUNT = "12500"
"""Rounds of GNU OpenMP's waiting loop before a thread sleeps: somewhat less than a millisecond.

Its own default of 300,000 outlasts a scheduler's time slice: where another program takes one of the cores, a thread
that waits burns the core that the thread it waits for needs. Waking a sleeping thread costs tens of microseconds, so
not spinning at all slows down a machine with nothing else to do (tools/bench_busy.py).
"""
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CPP_LOG = "TORCH_CPP_LOG_LEVEL"
"""Warnings of torch's C++ go past Python's to stderr: a profiled step that frees older memory has one of each 1,000."""
ALLOCATOR, SEGMENTS = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_ALLOCATING = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Say how threads wait, how memory of CUDA devices is kept and what torch's C++ says, unless the user did.

    For this process and those that it starts: call it before torch is imported.
    """
    limit_spinning(environment)
    expand_segments(environment)
    environment.setdefault(CPP_LOG, "ERROR")


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Bound how long OpenMP's threads spin, in this process and those it starts, unless the user said how they wait.

    libgomp reads its environment when it is loaded: call this before torch is imported. Other OpenMP libraries
    ignore the variable.
    """
    if not any(name in environment for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator grow the blocks that it takes of a CUDA device, unless the user said how it works.

    By default each block stays as large as it was taken, and gathers of several sizes next to activations leave holes
    that no later tensor fits into. The allocator reads the variable when it is first used. Nothing is said where there
    is no NVIDIA driver of Linux's own, since Windows' below WSL cannot do it, nor where CUDA has begun already.
    """
    if any(name in environment for name in _ALLOCATING) or is_wsl() or not any(map(Path.exists, _DRIVER)):
        return
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        environment[ALLOCATOR] = SEGMENTS


def is_wsl() -> bool:
    """Whether this is Windows' subsystem for Linux, whose driver lacks some of what Linux's own has."""
    return "microsoft" in platform.release().lower()
