"""Jobs for the tests of the workers, in a module that a worker can import."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import DataError


class OddError(Exception):
    """An exception that cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} {right}")


@dataclass(frozen=True)
class Echo:
    """Answers (the item, the worker's process id, its thread settings); what an item says is done first.

    An order is written, with the process and the answered item, to the file that the order names.
    """

    directory: Path | None = None
    left: dict[int, Any] = field(default_factory=dict)

    def start(self) -> Echo:
        return self

    def finish(self, number: int, order: tuple[Path, str]) -> None:
        path, what = order
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        with path.open("a") as file:
            file.write(f"{number} {what} {self.left.pop(number)} {os.getpid()}\n")

    def answer(self, number: int, item: Any) -> Any:
        self.left[number] = item
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
            case ("odd error", text):
                raise OddError(text, "odd")
            case ("big", size):
                return b"x" * size
        return item, os.getpid(), os.environ.get("TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class Threaded(Echo):
    """An Echo that has a thread from the start on."""

    def start(self) -> Echo:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return self


@dataclass(frozen=True)
class NeverStarts:
    """A job that cannot be started."""

    def start(self) -> Echo:
        raise DataError("cannot start")


class Unreadable:
    """An item that breaks the worker that reads it."""

    def __reduce__(self) -> Any:
        return (os.listdir, (1, 2, 3))
