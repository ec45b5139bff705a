"""What the process holds of the machine's memory."""

import ctypes
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory, or None where the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def give_back() -> None:
    """Return freed memory to the system, where the C library can: what a large load left behind stays with it else."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
