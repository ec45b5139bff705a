"""How a window is prepared: here and now, before any process group exists, or in a process of its own during training.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tuner.config.portions import Portion
from tuner.data.building.cache import cache_path
from tuner.data.building.prepare import find_prepared, prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.prepared import open_prepared
from tuner.errors import DataError, MachineError, NoRowsError, TunerError, rebuilt
from tuner.rundir.windows import WindowEntry
from tuner.runtime.console import Console


@dataclass(frozen=True)
class PreparedWindow:
    """What came of a window: the key of its prepared data and its rows; no key where it has none."""

    key: str = ""
    rows: int = 0
    warnings: tuple[str, ...] = ()


class Preparation(Protocol):
    """Prepares one window at a time."""

    def start(self, window: Portion) -> None:
        """Begin with a window."""

    def outcome(self) -> PreparedWindow | None:
        """What came of it; None while it is being prepared. Raises TunerError children."""

    def end(self) -> None:
        """Leave what is being prepared."""


@dataclass
class PreparedHere:
    """Prepares in this process, at once."""

    spec: PrepareSpec
    console: Console
    only_found: bool = False
    """Whether it must have been prepared before."""
    _window: Portion | None = None

    def start(self, window: Portion) -> None:
        """Keep it for `outcome`."""
        self._window = window

    def outcome(self) -> PreparedWindow:
        """Prepare it now. Raises DataError for rows that cannot be used, MachineError."""
        spec = replace(self.spec, portion=self._window)
        if self.only_found and find_prepared(spec) is None:
            raise DataError("it is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
        try:
            info = prepare(spec, self.console)
        except NoRowsError:
            return PreparedWindow()
        return PreparedWindow(info.key, len(open_prepared(info.path).train), info.warnings)

    def end(self) -> None:
        """Nothing is under way."""


@dataclass
class PreparedBeside:
    """Prepares in a process of its own, which training goes before; what it says is in a log of the run."""

    recipe: Mapping[str, Any]
    """As plain values."""
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def start(self, window: Portion) -> None:
        """Start the process. Raises MachineError."""
        job = {"recipe": dict(self.recipe), "window": {"name": window.name, "files": list(window.files)}}
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = self.start_process(
                    [sys.executable, "-m", "tuner.run.windows.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,  # Ctrl-C at the terminal is training's to heed
                )
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(json.dumps(job).encode())
        except OSError as error:
            raise MachineError(f"the next window cannot be prepared: {error.strerror or error}") from error

    def outcome(self) -> PreparedWindow | None:
        """What the process wrote, once it has ended. Raises its error, MachineError where it was killed."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        self._process = None
        assert process.stdout is not None
        with process.stdout as out:
            said = out.read()
        try:
            answer = json.loads(said)
        except ValueError:
            raise MachineError(
                f"preparing a window ended with code {process.returncode} and said nothing", hint=f"its log: {self.log}"
            ) from None
        return _read(answer)

    def end(self) -> None:
        """End the process: what it has published stays, and the next builder removes the rest."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def prepared_window(spec: PrepareSpec, entry: WindowEntry) -> Path:
    """The directory of a window's prepared data."""
    return cache_path(spec.cache_dir, "prepared", entry.key)


def _read(answer: Mapping[str, Any]) -> PreparedWindow:
    if "error" in answer:
        error = answer["error"]
        known: TunerError = rebuilt(error["type"], error["message"], error["hint"], error["exit_code"])
        raise known
    if "empty" in answer:
        return PreparedWindow()
    return PreparedWindow(answer["key"], int(answer["rows"]), tuple(answer["warnings"]))
