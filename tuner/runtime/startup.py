"""What a launch does before its first step, and for how long: seconds of named phases, none counted twice.

The time of a phase inside another one is subtracted from the outer one. What lies in none is ``other``, so that all of
them add up to the time from the beginning to the end. One launch at a time: a process trains one model after the
other.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

LIBRARIES, OTHER = "libraries", "other"
_WHOLE_SECONDS_FROM = 10.0
_seconds: dict[str, float] = {}
_remarks: list[str] = []
_open: list[str] = []
_since: float | None = None


def begin(with_process: bool = False) -> None:
    """A launch begins here, or ``with_process`` when the process did, which has loaded libraries since."""
    global _since  # noqa: PLW0603 - one launch at a time
    _clear()
    _since = time.monotonic()
    if with_process:
        _seconds[LIBRARIES] = _process_seconds()


def is_begun() -> bool:
    """Whether a launch has begun that has taken no step yet."""
    return _since is not None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What is done in the block is this; nothing is measured where no launch has begun."""
    if not is_begun():
        yield
        return
    _turn()
    _open.append(name)
    try:
        yield
    finally:
        if is_begun() and _open:
            _turn()
            _open.pop()


def remark(text: str) -> None:
    """Have the line of the start end with this, such as what took no time since it was known."""
    if is_begun():
        _remarks.append(text)


def end() -> tuple[dict[str, float], tuple[str, ...]]:
    """The seconds of each phase up to here, in the order in which they began, and the remarks; the launch has begun."""
    global _since  # noqa: PLW0603
    _turn()
    found = {name: round(_seconds[name], 3) for name in sorted(_seconds, key=lambda name: name == OTHER)}
    remarks = tuple(dict.fromkeys(_remarks))
    _clear()
    _since = None
    return found, remarks


def in_words(seconds: Mapping[str, float], remarks: Iterable[str] = ()) -> str:
    """Such as ``21 s: libraries 4, plan 3, weights 6, checks 1, compiling 7``; what rounds to nothing is left out."""
    total = sum(seconds.values())
    digits = 0 if total >= _WHOLE_SECONDS_FROM else 1
    parts = (f"{name} {value:.{digits}f}" for name, value in seconds.items() if round(value, digits) > 0)
    return "; ".join([f"{total:.{digits}f} s: {', '.join(parts)}", *remarks])


def _clear() -> None:
    _seconds.clear()
    _remarks.clear()
    _open.clear()


def _turn() -> None:
    """Give what has passed since the last turn to the innermost open phase."""
    global _since  # noqa: PLW0603
    assert _since is not None, "a launch has begun"
    now = time.monotonic()
    name = _open[-1] if _open else OTHER
    _seconds[name] = _seconds.get(name, 0.0) + now - _since
    _since = now


def _process_seconds() -> float:
    """Seconds since this process began (proc(5), starttime); 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
