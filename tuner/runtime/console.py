"""What people see: aligned lines, what is being done and a live bar on stderr, from the main process only."""

import textwrap
import time
import unicodedata
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tuner.runtime import activity
from tuner.runtime.activity import STDERR, Activity, Doing
from tuner.runtime.files import append
from tuner.runtime.warned import note_warning

LABEL_WIDTH = activity.LABEL_WIDTH
EARLY_LINES = 200
"""Lines that are remembered for a log that is opened later."""
UNBOUNDED_WIDTH = 150
"""Columns to which texts are cut where no terminal says how many it has."""
BAR_WIDTH = 20
SEPARATOR = " · "
Level = Literal["debug", "info", "warning", "error"]
_ORDER: dict[str, int] = {"debug": 0, "info": 1, "warning": 2, "error": 3}
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Updates(Protocol):
    """Work that is under way and can say how far it is."""

    def update(self, text: str) -> None:
        """Say this of the work from here on."""


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


def one_line(text: str, width: int, end: bool = False) -> str:
    """A text on one line of at most ``width`` columns; one of white space alone in quotes, with escapes.

    Of a longer one its beginning is shown, or its `end`.
    """
    shown = " ".join(text.split()) or repr(text)
    if len(shown) <= width:
        return shown
    return f"…{shown[len(shown) - width + 1 :]}" if end else f"{shown[: width - 1]}…"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns, broken between the parts of a line where these fit, else between words.

    A longer word, such as a path, stays whole.
    """
    if len(text) <= width:
        return [text]
    lines = [""]
    for number, part in enumerate(text.split(SEPARATOR)):
        joined = f"{lines[-1]}{SEPARATOR if number else ''}{part}"
        if len(joined) <= width:
            lines[-1] = joined
            continue
        fresh = textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [""]
        lines = [*lines, *fresh] if number else fresh
    return lines


class ProgressBar:
    """One live bar; where it is disabled, without a terminal, nothing is drawn."""

    def __init__(self, bar: RichProgress, label: str, total: int) -> None:
        self._bar, self._note = bar, ""
        self._task = bar.add_task(escape(label), total=total, note="")

    def update(self, completed: int, note: str = "") -> None:
        """Show `completed` of the total and a short note."""
        self._note = note
        self._bar.update(self._task, completed=completed, note=escape(note))

    def lengthen(self, total: int) -> None:
        """The total is another one by now."""
        self._bar.update(self._task, total=total)

    @contextmanager
    def doing(self, text: str) -> Iterator[Updates]:
        """Show `text` in place of the note for the length of the block."""
        shown = _InBar(self._bar, self._task)
        shown.update(text)
        self._bar.refresh()
        try:
            yield shown
        finally:
            shown.update(self._note)


class _InBar:
    """What is being done while a bar stands still, in place of its note."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def update(self, text: str) -> None:
        self._bar.update(self._task, note=escape(text))


class Console:
    """Writes `label     text` lines to stderr (or `stream`); silent unless `main`, and below `level`.

    Colour, bars and line breaks between words need a terminal; colour also the absence of NO_COLOR. A closed stderr is
    no error. `keep` has every line written to a file too, by any process.
    """

    def __init__(self, main: bool = True, level: Level = "info", stream: IO[str] | None = None) -> None:
        self._level = _ORDER[level]
        self._main = main
        self._log: Path | None = None
        self._early: deque[str] = deque(maxlen=EARLY_LINES)
        self._rich = RichConsole(
            file=stream, stderr=stream is None, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._activity = STDERR if stream is None else Activity(stream)
        self._bar: ProgressBar | None = None

    @property
    def is_heard(self) -> bool:
        """Whether lines of level `info` are shown."""
        return self._main and self._level <= _ORDER["info"]

    @property
    def is_live(self) -> bool:
        """Whether bars are drawn."""
        return self.is_heard and self._rich.is_terminal

    @property
    def width(self) -> int:
        """Columns that a line may have, label included: the terminal's, or enough where there is none."""
        return self._rich.width if self._rich.is_terminal else UNBOUNDED_WIDTH

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
        lines = [escape(part) for part in text.split("\n")]
        self._print(_labelled(label, style, lines), level, _labelled(label, style, self._fitted(lines)))

    def line(self, text: str) -> None:
        """One line without a label, such as a row of the step table."""
        line = Text(escape(text))
        self._print(line, "info", line)

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
        line = Text.assemble(("error: ", "bold red"), "\n  ".join(escape(part) for part in message.split("\n")))
        if hint is not None:
            line.append("\n  " + "\n  ".join(escape(part) for part in hint.split("\n")))
        self._note(line.plain)
        self._write(line)

    @contextmanager
    def progress(self, label: str, total: int, estimates: bool = True) -> Iterator[ProgressBar]:
        """A bar for the length of the block; lines said meanwhile appear above it.

        It `estimates` the time left from its own pace, unless its notes say better.
        """
        columns = (TextColumn("{task.description}", markup=False), BarColumn(BAR_WIDTH), MofNCompleteColumn())
        note = TextColumn("{task.fields[note]}", markup=False)
        tail = (note, TimeRemainingColumn()) if estimates else (note,)
        rich: dict[str, Any] = {"console": self._rich, "transient": True, "redirect_stdout": False}
        aside = self._activity.paused() if self.is_live else nullcontext()
        with aside, RichProgress(*columns, *tail, disable=not self.is_live, **rich) as bar:
            shown = ProgressBar(bar, label, total)
            self._bar = shown if self.is_live else None
            try:
                yield shown
            finally:
                self._bar = None

    def doing(self, text: str, at_once: bool = False) -> AbstractContextManager[Updates]:
        """Say what is being done until the block ends, as `loading model`: in the bar, or on a line of its own.

        That line is gone afterwards. Without a terminal it is written, and stays, where the work takes some seconds;
        ``at_once`` writes it before the work begins.
        """
        if not self.is_heard:
            return nullcontext(Doing(text))
        return self._activity.doing(text, at_once) if self._bar is None else self._bar.doing(text)

    def _fitted(self, lines: list[str]) -> list[str]:
        """The lines, those that are too long for the terminal broken between words."""
        if not self._rich.is_terminal:
            return lines
        width = max(20, self._rich.width - LABEL_WIDTH)
        return [part for line in lines for part in wrapped(line, width)]

    def _print(self, line: Text, level: Level, shown: Text) -> None:
        """Note a line in the log, and show it as it fits the terminal."""
        if _ORDER[level] >= min(self._level, _ORDER["info"]):
            self._note(line.plain)
        if self._main and _ORDER[level] >= self._level:
            self._write(shown)

    def _note(self, text: str) -> None:
        stamped = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}  {text}\n"
        if self._log is None:
            self._early.append(stamped)
        else:
            _append(self._log, stamped)

    def _write(self, line: Text) -> None:
        # A closed pipe or descriptor: the work continues, nobody reads the console any more.
        with suppress(OSError, ValueError), self._activity.aside():
            self._rich.print(line, soft_wrap=True)


def _labelled(label: str, style: str, lines: list[str]) -> Text:
    shown = ("\n" + " " * LABEL_WIDTH).join(lines)
    return Text.assemble((f"{escape(label):<{LABEL_WIDTH}}", style), shown)


def _append(path: Path, text: str) -> None:
    # A disk that fails here fails at the next checkpoint, where it is reported.
    with suppress(OSError):
        append(path, text.encode(errors="backslashreplace"))
