"""What a command is doing while nothing else is said: one line, redrawn on a terminal and written once elsewhere.

On a terminal it appears after a moment of silence and is gone as soon as something else is written or the work ends.
Elsewhere it is one plain line for work that takes some seconds, and at once for what a command begins with. Nothing
heavy is imported here, so that a command can say what it does before it loads anything.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO

LABEL_WIDTH = 10
"""Columns of the label that begins every line on stderr."""
FRAME_S, APPEARS_S = 0.1, 0.15
"""Between two drawings on a terminal; the silence before the first."""
WRITTEN_S, AGAIN_S = 5.0, 30.0
"""How long work takes before it is worth a line where there is no terminal; between lines that say how far it is."""
TIMED_S = 2.0
FRAMES, PLAIN_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


@dataclass(eq=False)
class Doing:
    """Work that is under way; `text` is what is said of it and may change while it lasts."""

    text: str
    started: float = field(default_factory=time.monotonic)
    written: str = ""
    """What was written of it last, where there is no terminal."""
    written_at: float = 0.0

    def update(self, text: str) -> None:
        """Say this of the work from here on, such as how far it is."""
        self.text = text


class Activity:
    """The line of one stream. `stream` is None for this process's stderr, whatever that is at the time."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._under_way: list[Doing] = []
        self._paused = 0
        self._is_drawn = False
        self._silent_since = 0.0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @contextmanager
    def doing(self, text: str, at_once: bool = False) -> Iterator[Doing]:
        """Say `text` for the length of the block; the innermost block's text is the one that is shown."""
        doing = Doing(text)
        with self._lock:
            self._under_way.append(doing)
            if at_once and not self._paused:
                self._silent_since = 0.0
                self._show(doing, written_s=0.0)
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._keep, args=(self._ended,), name="activity", daemon=True)
                self._thread.start()
        try:
            yield doing
        finally:
            self._end(doing)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The line is out of the way for what is written inside, and comes back once that is followed by silence."""
        with self._lock:
            self._erase()
            yield
            self._silent_since = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is drawn for the length of the block, which shows by itself how far it is, or waits for a person."""
        with self._lock:
            self._erase()
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._silent_since = time.monotonic()

    def _end(self, doing: Doing) -> None:
        thread = None
        with self._lock:
            self._erase()
            if doing in self._under_way:  # not in a child that was forked meanwhile
                self._under_way.remove(doing)
            if not self._under_way and self._thread is not None:
                thread, self._thread = self._thread, None
                self._ended.set()
        if thread is not None:
            thread.join()

    def _keep(self, ended: threading.Event) -> None:
        """Draw again and again; the thread lives as long as anything is under way."""
        while not ended.wait(FRAME_S):
            with self._lock:
                if self._under_way and not self._paused:
                    self._show(self._under_way[-1], WRITTEN_S)

    def _show(self, doing: Doing, written_s: float) -> None:
        """Draw the line, or write it where there is no terminal and the work has lasted ``written_s`` in silence."""
        stream = self._stream or sys.stderr
        now = time.monotonic()
        # A closed stream has nobody to read it.
        with suppress(OSError, ValueError, AttributeError):
            if _is_terminal(stream):
                if now - self._silent_since >= APPEARS_S:
                    stream.write(_drawn(doing, stream, now))
                    stream.flush()
                    self._is_drawn = True
            elif _is_due(doing, now, self._silent_since, written_s):
                doing.written, doing.written_at = doing.text, now
                label, _, rest = doing.text.partition(" ")
                stream.write(f"{label:<{LABEL_WIDTH - 1}} {rest}\n")
                stream.flush()

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with suppress(OSError, ValueError, AttributeError):
                stream = self._stream or sys.stderr
                stream.write("\r\x1b[K")
                stream.flush()

    def hold(self) -> None:
        """Before a fork: no thread is in the midst of a line, and holds a lock that the child would never get."""
        self._lock.acquire()

    def release(self) -> None:
        """After a fork, in the process that was forked."""
        self._lock.release()

    def forget(self) -> None:
        """In a child that was forked: nothing is under way here, and no thread draws."""
        self._lock, self._under_way, self._paused, self._is_drawn = threading.RLock(), [], 0, False
        self._thread = None


def _is_due(doing: Doing, now: float, silent_since: float, written_s: float) -> bool:
    """Whether work has lasted long enough to be written, or to be written again with what has changed."""
    if doing.written:
        return doing.text != doing.written and now - doing.written_at >= AGAIN_S
    return now - max(doing.started, silent_since) >= written_s


def _is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _drawn(doing: Doing, stream: IO[str], now: float) -> str:
    """The line as a terminal takes it; the cursor stays at its start, where whatever else is written goes over it."""
    frames = FRAMES if "utf" in (getattr(stream, "encoding", None) or "").lower() else PLAIN_FRAMES
    seconds = now - doing.started
    since = f" ({seconds:.0f} s)" if seconds >= TIMED_S else ""
    text = f"{frames[int(now / FRAME_S) % len(frames)]} {doing.text}{since}"
    return f"\r{text[: _columns(stream) - 1]}\x1b[K\r"


def _columns(stream: IO[str]) -> int:
    with suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


STDERR = Activity()
"""That of this process's stderr."""
os.register_at_fork(before=STDERR.hold, after_in_parent=STDERR.release, after_in_child=STDERR.forget)
