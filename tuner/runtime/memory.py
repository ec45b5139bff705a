"""What the process holds of the machine's memory."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
_CALM_OBJECTS = 200_000


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives, since 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory, or None where the system does not say."""
    if sys.platform != "linux":
        return None
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def allocated_bytes() -> int | None:
    """Return the bytes that the C library has given out and not got back, or None where it does not say.

    Unlike the resident size it has no holes in it, and none of Python's small objects. It takes up to 30 ms.
    """
    count = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if count is None:
        return None
    count.restype = _Mallinfo
    found = count()
    return int(found.uordblks) + int(found.hblkhd)


@contextmanager
def calm_collector() -> Iterator[None]:
    """Let the collector of cycles look at new objects alone, and seldom: for work that makes many and no cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_CALM_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def give_back() -> None:
    """Return freed memory to the system, where the C library can: what a large load left behind stays with it else."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
