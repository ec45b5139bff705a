"""The warnings of a command, wherever in its processes they are said: what stderr shows, its document holds, once.

They come from `Console.warn`, from Python's `warnings` and from libraries' loggers, in any thread. Each rank of a run
leaves its own in a file, so that they outlive a rank that is killed.
"""

import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tuner.runtime.files import append


class Warned:
    """Distinct warnings in the order in which they were first said; each is a JSON line of `path`, too, if given."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._texts: dict[str, None] = {}
        self._lock = threading.Lock()

    @property
    def texts(self) -> list[str]:
        """What was said so far."""
        with self._lock:
            return list(self._texts)

    def add(self, text: str) -> bool:
        """Take note of a warning; whether it is a new one."""
        with self._lock:
            if text in self._texts:
                return False
            self._texts[text] = None
            if self._path is not None:
                with suppress(OSError):  # it is on stderr all the same
                    append(self._path, json.dumps(text).encode() + b"\n")
        return True


_listening: list[tuple[Warned, Callable[[str], None]]] = []
"""Who collects in this process, and how it writes to stderr; a command within a command, as in tests, has its own."""


def note_warning(text: str) -> None:
    """Have a warning that is being said in the document of the command, if this process runs one."""
    if _listening:
        _listening[-1][0].add(text)


def pass_on(text: str) -> None:
    """Say a warning that another process met and did not say, once, and have it in the command's document."""
    if not _listening:
        print(f"warning: {text}", file=sys.stderr)
        return
    warned, say = _listening[-1]
    if warned.add(text):
        say(f"warning: {text}")


@contextmanager
def collected(into: Warned, say: Callable[[str], None]) -> Iterator[None]:
    """Collect what is said inside the block, by any thread. `say` writes a line of Python's warnings to stderr."""
    shown, factory = warnings.showwarning, logging.getLogRecordFactory()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        text = python_warning(message, category, filename, lineno)
        if into.add(text):
            say(f"warning: {text}")

    def record(*args: Any, **named: Any) -> logging.LogRecord:
        made = factory(*args, **named)
        if made.levelno >= logging.WARNING and _reaches_stderr(made):
            with suppress(TypeError, ValueError):  # a message that does not fit its arguments
                into.add(_one_line(made.getMessage()))
        return made

    own = (into, say)
    _listening.append(own)
    warnings.showwarning = show
    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        warnings.showwarning = shown
        _listening.remove(own)


def python_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str:
    """A warning of Python's `warnings` on one line: its class, its words and where it was raised."""
    return f"{category.__name__}: {_one_line(str(message))} ({filename}:{lineno})"


def read_warned(path: Path) -> list[str]:
    """The warnings in another process's file, which may end in half a line; none where there is no file."""
    found = list[str]()
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").split("\n"):
            with suppress(ValueError):
                found.append(str(json.loads(line)))
    return found


def _reaches_stderr(record: logging.LogRecord) -> bool:
    """Whether a handler writes a record to the terminal: one of its logger or of those above it, else Python's own."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    handled = False
    while logger is not None:
        for handler in logger.handlers:
            handled = True
            is_shown = isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__)
            if is_shown and record.levelno >= handler.level:
                return True
        logger = logger.parent if logger.propagate else None
    return not handled


def _one_line(text: str) -> str:
    return " ".join(text.split())
