"""What the process holds of the machine's memory, and what becomes of what it frees, in a training on a CPU.

By default glibc takes each large block fresh from the system and gives it back when it is freed, so that a step pays
again for the same pages: a quarter of the step, measured. Freed blocks that are kept cost nothing when they are used
again, but they come to lie between others, and what does not fill them stays with the process: up to a tenth of what a
step holds, after a few steps.
"""

import ctypes
import gc
import mmap
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOLES = 0.125
"""Room for holes, as a share of the most that the process held in a step without them."""
NEAR = 0.02
"""Room that is to be left once the holes are there, as a share of the most that the process held with them."""
_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
_PAGE_BYTES = 4096
_CALM_OBJECTS = 200_000
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # mallopt's names for them in malloc.h
_OWN_PAGES = 1 << 20
_MOST_MAPPED = 1 << 15
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_CLEAR_REFS, _FORGET_PEAK = Path("/proc/self/clear_refs"), "5"
_MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
_forgotten_peak = 0
"""Process-wide, as the peak is that the system counts."""


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives, since 2.33."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def host_memory() -> tuple[int, int]:
    """Total and available bytes of the machine, bounded by the control group's limit."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        facts = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, flags=re.MULTILINE)}
        total, free = facts["MemTotal"], facts["MemAvailable"]
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return total, free
    return min(total, limit), max(0, min(free, limit - used))


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory, or None where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
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
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


class FreedMemory:
    """What becomes of freed memory, decided after each step by the most that the process has held of ``room_bytes``.

    The first step returns it, and so shows what is needed without holes. Where there is room for them, it is kept from
    then on; where a later step comes too near to the end of it, it is returned again, to the end of the process.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room = min([room_bytes, *_own_limits()])
        self.kept = False
        self._is_settled = False

    def before_first_step(self) -> None:
        """Return what is free, and what the step frees; what building the model held is no measure of a step."""
        self._is_settled = not return_freed_memory()
        _forget_peak()

    def after_step(self) -> None:
        """Look at what was held, and change what becomes of freed memory where that takes it."""
        if self._is_settled or self._has_room() == self.kept:
            return
        if self.kept:
            return_freed_memory()
            self.kept, self._is_settled = False, True
        else:
            self.kept = keep_freed_memory(self._room // 2)

    def _has_room(self) -> bool:
        return _counted_peak() * (1 + (NEAR if self.kept else HOLES)) <= self._room


def peak_resident_bytes() -> int:
    """The most bytes of this process that were in memory at a time."""
    return max(_forgotten_peak, _counted_peak())


def _counted_peak() -> int:
    """By the system's count for this program; `getrusage` has what the process held before it became this one, too."""
    with suppress(OSError):
        if (found := re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), flags=re.MULTILINE)) is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    """Have the system count from here on, where it can: proc(5), clear_refs."""
    global _forgotten_peak  # noqa: PLW0603 - process-wide
    peak = peak_resident_bytes()
    with suppress(OSError):
        _CLEAR_REFS.write_text(_FORGET_PEAK)
        _forgotten_peak = peak


def return_freed_memory() -> bool:
    """Give large blocks back to the system when they are freed, and what is free by now; false without glibc."""
    if (library := _glibc()) is None:
        return False
    library.mallopt(_MMAP_THRESHOLD, _OWN_PAGES)  # from a size on that is a hole worth counting, and always the same
    library.mallopt(_MMAP_MAX, _MOST_MAPPED)
    library.mallopt(_TRIM_THRESHOLD, _OWN_PAGES)
    give_back()
    return True


def keep_freed_memory(reserve_bytes: int) -> bool:
    """Keep freed blocks for the next allocation, from now on; false where there is no glibc.

    The heap grows by ``reserve_bytes`` of addresses in huge pages. They cost no memory before they are used; where the
    system refuses them, the heap grows in small pages as it is needed.
    """
    if (library := _glibc()) is None:
        return False
    library.mallopt(_MMAP_MAX, 0)  # large blocks come from the heap too, where they are found again
    library.mallopt(_TRIM_THRESHOLD, -1)  # the heap never shrinks
    _reserve_huge_pages(library, reserve_bytes)
    return True


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def _own_limits() -> list[int]:
    """What the system lets this process take, in bytes: of data, and of addresses."""
    soft = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return [limit for limit in soft if limit != resource.RLIM_INFINITY]


def _reserve_huge_pages(library: ctypes.CDLL, size: int) -> None:
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if not (block := library.malloc(size)):
        return
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    length = (block + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        library.madvise(start, length, _MADV_HUGEPAGE)
    library.free(block)
