"""Jobs for the tests of the workers, in a module that a worker can import."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import DataError


class OddError(Exception):
    """An exception that cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} {right}")


@dataclass(frozen=True)
class Echo:
    """Answers (the item, the worker's process id, its thread settings); what an item says is done first."""

    directory: Path | None = None

    def start(self) -> Callable[[Any], Any]:
        return self.answer

    def answer(self, item: Any) -> Any:
        if self.directory is not None:
            (self.directory / str(os.getpid())).touch()
        match item:
            case ("sleep", seconds):
                time.sleep(seconds)
            case ("die", number):
                os.kill(os.getpid(), number)
                signal.pause()
            case ("exit", code):
                os._exit(code)
            case ("warn", text):
                warnings.warn(text, UserWarning, stacklevel=1)
            case ("data error", text):
                raise DataError(text, hint="mend it")
            case ("unseen", text):
                raise DataError(text) from FileNotFoundError()
            case ("odd error", text):
                raise OddError(text, "odd")
            case ("big", size, *seconds):
                time.sleep(sum(seconds))
                return b"x" * size
        return item, os.getpid(), os.environ.get("TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class NeverStarts:
    """A job that cannot be started."""

    def start(self) -> Callable[[Any], Any]:
        raise DataError("cannot start")


class Unreadable:
    """An item that the worker cannot read."""

    def __reduce__(self) -> Any:
        return (os.listdir, (1, 2, 3))
