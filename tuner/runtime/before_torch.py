"""What libraries read from the environment when they are loaded, settled before torch is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import MutableMapping
from pathlib import Path

from tuner.runtime.openmp import limit_spinning

ALLOCATOR, SEGMENTS = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_SET_BY_THE_USER = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """Say how threads wait for each other, and how memory of CUDA devices is kept, unless the user did.

    For this process and those that it starts: call it before torch is imported.
    """
    limit_spinning(environment)
    expand_segments(environment)


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator grow the blocks that it takes of a CUDA device, unless the user said how it works.

    By default each block stays as large as it was taken, and gathers of several sizes next to activations leave holes
    that no later tensor fits into. The allocator reads the variable when it is first used. Nothing is said where there
    is no NVIDIA driver of Linux's own, since Windows' below WSL cannot do it, nor where CUDA has begun already.
    """
    if any(name in environment for name in _SET_BY_THE_USER) or is_wsl() or not any(map(Path.exists, _DRIVER)):
        return
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        environment[ALLOCATOR] = SEGMENTS


def is_wsl() -> bool:
    """Whether this is Windows' subsystem for Linux, whose driver lacks some of what Linux's own has."""
    return "microsoft" in platform.release().lower()
