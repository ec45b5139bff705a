"""What this process is doing, in a few words that outlive it: whoever watches it reads them after it was killed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

BOARD_BYTES = 128
_board: mmap.mmap | None = None
_words = ""


def enter(words: str) -> None:
    """From here on the process does this, such as `step 7, backward`. Costs a write to memory."""
    global _words  # noqa: PLW0603 - a process does one thing at a time
    _words = words
    if _board is not None:
        _board[:] = words.encode()[:BOARD_BYTES].ljust(BOARD_BYTES, b"\0")


def at() -> str:
    """` at WORDS`, to follow what went wrong; empty where nothing was entered."""
    return f" at {_words}" if _words else ""


def publish(path: Path) -> None:
    """Show the words in a new file, too: the system keeps its pages, so a SIGKILL loses nothing. Raises OSError."""
    global _board  # noqa: PLW0603 - one board a process
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, BOARD_BYTES)
        _board = mmap.mmap(descriptor, BOARD_BYTES)
    finally:
        os.close(descriptor)
    enter(_words)


def at_last(path: Path) -> str:
    """` at WORDS` of the process that published there; empty where none did, or entered nothing. Raises OSError."""
    words = path.read_bytes().rstrip(b"\0").decode(errors="ignore") if path.is_file() else ""
    return f" at {words}" if words else ""
