"""What the process holds of the machine's memory, and how the C library keeps what is freed.

By default glibc takes every large block fresh from the system and gives it back when it is freed, so that each step of
a training run on a CPU pays again for the same pages: a quarter of the step, measured.
"""

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
_CALM_OBJECTS = 200_000
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them in malloc.h
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


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


def keep_freed_memory(reserve_bytes: int) -> bool:
    """Keep freed blocks for the next allocation, from now to the end of the process; false where there is no glibc.

    The heap grows by ``reserve_bytes`` of addresses in huge pages. They cost no memory before they are used; where the
    system refuses them, the heap grows in small pages as it is needed.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt(_MMAP_MAX, 0)  # large blocks come from the heap too, where they are found again
    library.mallopt(_TRIM_THRESHOLD, -1)  # the heap never shrinks
    _reserve_huge_pages(library, reserve_bytes)
    return True


def _reserve_huge_pages(library: ctypes.CDLL, size: int) -> None:
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = library.malloc(size)
    if not block:
        return
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    length = (block + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        library.madvise(start, length, _MADV_HUGEPAGE)
    library.free(block)
