"""What this process is doing, in a few words that outlive it: whoever watches it reads them after it was killed."""

import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tuner.runtime.files import opened
from tuner.runtime.members import member

STATUS_BYTES = 128
_status: mmap.mmap | None = None
_words = ""
_observers: list[Callable[[str], None]] = []


def enter(words: str) -> None:
    """From here on the process does this, such as `save of step 4`. Costs a write to memory."""
    global _words  # noqa: PLW0603 - a process does one thing at a time
    _words = words
    if _status is not None:
        _status[:] = words.encode()[:STATUS_BYTES].ljust(STATUS_BYTES, b"\0")


def enter_part(step: int, part: str) -> None:
    """A part of a step begins, such as `backward` of step 7; instruments that observe steps are notified."""
    enter(f"step {step}, {part}")
    for observer in _observers:
        observer(part)


def observed(observer: Callable[[str], None]) -> AbstractContextManager[None]:
    """Have `observer` called with the name of each part of a step as it begins, for the length of the block."""
    return member(_observers, observer)


def at() -> str:
    """` at WORDS`, to follow what went wrong; empty where nothing was entered."""
    return f" at {_words}" if _words else ""


def publish(path: Path) -> None:
    """Show the words in a new file, too: the system keeps its pages, so a SIGKILL loses nothing. Raises OSError."""
    global _status  # noqa: PLW0603 - one status file a process
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as descriptor:
        os.ftruncate(descriptor, STATUS_BYTES)
        _status = mmap.mmap(descriptor, STATUS_BYTES)
    enter(_words)


def at_last(path: Path) -> str:
    """` at WORDS` of the process that published there; empty where none did, or entered nothing. Raises OSError."""
    words = path.read_bytes().rstrip(b"\0").decode(errors="ignore") if path.is_file() else ""
    return f" at {words}" if words else ""
