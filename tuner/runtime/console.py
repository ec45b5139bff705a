"""What people see: aligned lines and a live bar on stderr, from the main process only."""

from __future__ import annotations

import time
import unicodedata
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tuner.runtime.files import append
from tuner.runtime.warned import note_warning

LABEL_WIDTH = 10
EARLY_LINES = 200
"""Lines that are remembered for a log that is opened later."""
Level = Literal["debug", "info", "warning", "error"]
_ORDER: dict[str, int] = {"debug": 0, "info": 1, "warning": 2, "error": 3}
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape(text: str) -> str:
    """`text` with control, line-separating, direction-changing and surrogate characters as `\\x..` or `\\u....`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) for char in text)


def _escaped(char: str) -> str:
    if unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp") and char not in _DIRECTION:
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class ProgressBar:
    """One live bar; without a terminal every call does nothing."""

    def __init__(self, bar: RichProgress | None, label: str, total: int) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task(escape(label), total=total, note="")

    def update(self, completed: int, note: str = "") -> None:
        """Show `completed` of the total and a short note."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=completed, note=escape(note))


class Console:
    """Writes `label     text` lines to stderr (or `stream`); silent unless `main`, and below `level`.

    Colour and bars need a terminal and the absence of NO_COLOR. A closed stderr is no error. `keep` has every line
    written to a file too, by any process.
    """

    def __init__(self, main: bool = True, level: Level = "info", stream: IO[str] | None = None) -> None:
        self._level = _ORDER[level]
        self._main = main
        self._log: Path | None = None
        self._early: deque[str] = deque(maxlen=EARLY_LINES)
        self._rich = RichConsole(
            file=stream, stderr=stream is None, highlight=False, markup=False, emoji=False, soft_wrap=True
        )

    @property
    def is_live(self) -> bool:
        """Whether bars are drawn."""
        return self._main and self._rich.is_terminal and self._level <= _ORDER["info"]

    def keep(self, path: Path) -> None:
        """Append what was said so far, and every line from here on, to a file, each with its time (UTC).

        The file gets what is said at level `info` and above, however little is shown.
        """
        self._log = path
        while self._early:
            _append(path, self._early.popleft())

    def say(self, label: str, text: str, level: Level = "info") -> None:
        """One aligned line; a newline in `text` continues below the text, other control characters are escaped."""
        style = {"warning": "yellow", "error": "bold red"}.get(level, "bold")
        first, *rest = text.split("\n")
        line = Text(f"{escape(label):<{LABEL_WIDTH}}", style=style)
        line.append(escape(first), style="")
        for part in rest:
            line.append("\n" + " " * LABEL_WIDTH + escape(part), style="")
        self._print(line, level)

    def line(self, text: str) -> None:
        """One line without a label, such as a row of the step table."""
        self._print(Text(escape(text)), "info")

    def debug(self, text: str) -> None:
        """A detail, shown at level `debug`."""
        self.say("debug", text, "debug")

    def warn(self, text: str) -> None:
        """A warning, shown at level `warning` and below, and noted in the command's document at every level."""
        if self._main:
            note_warning(text)
        self.say("warning", text, "warning")

    def error(self, message: str, hint: str | None = None) -> None:
        """`error: message` with the hint below it; shown at every level, by any rank."""
        line = Text("error: ", style="bold red")
        line.append("\n  ".join(escape(part) for part in message.split("\n")), style="")
        if hint is not None:
            line.append("\n  " + "\n  ".join(escape(part) for part in hint.split("\n")), style="")
        self._note(line.plain)
        self._write(line)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[ProgressBar]:
        """A bar for the length of the block; lines said meanwhile appear above it."""
        if not self.is_live:
            yield ProgressBar(None, label, total)
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        tail = (TextColumn("{task.fields[note]}", markup=False), TimeRemainingColumn())
        with RichProgress(*columns, *tail, console=self._rich, transient=True, redirect_stdout=False) as bar:
            yield ProgressBar(bar, label, total)

    def _print(self, line: Text, level: Level) -> None:
        if _ORDER[level] >= min(self._level, _ORDER["info"]):
            self._note(line.plain)
        if self._main and _ORDER[level] >= self._level:
            self._write(line)

    def _note(self, text: str) -> None:
        stamped = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}  {text}\n"
        if self._log is None:
            self._early.append(stamped)
        else:
            _append(self._log, stamped)

    def _write(self, line: Text) -> None:
        # A closed pipe or descriptor: the work goes on, there is nobody left to tell.
        try:
            self._rich.print(line, soft_wrap=True)
        except (OSError, ValueError):
            return


def _append(path: Path, text: str) -> None:
    # A disk that fails here fails at the next checkpoint, where it is reported.
    with suppress(OSError):
        append(path, text.encode(errors="backslashreplace"))
