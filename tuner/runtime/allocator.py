"""The C library's allocator, set for work that asks for the same large blocks again and again.

By default glibc takes every large block fresh from the system and gives it back when it is freed, so that each step of
a training run on a CPU pays again for the same pages: a quarter of the step, measured. Here freed memory stays with
the process, and the heap lies in huge pages where the system grants them on request.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them in malloc.h
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


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
