"""The task that ends a launch before its run is over."""

import time
from pathlib import Path

from tuner.config.numbers import Duration
from tuner.config.recipe import TIMES
from tuner.run.parts.part import LaunchContext
from tuner.rundir.layout import STOP
from tuner.setup.build import Assembly
from tuner.train.plan import steps_of
from tuner.train.tasks import Request, Task


class StopTask(Task):
    """Asks for a stop on a signal, for a file (STOP in the run directory, or `train.stop_file`), and after
    `train.stop_after`."""

    def __init__(self, context: LaunchContext, stop_after: Duration | None, stop_file: str | None) -> None:
        self._progress, self._signals = context.progress, context.signals
        self._file = context.run.path / STOP
        self._shared = None if stop_file is None else Path(stop_file)
        self._steps, self._seconds = _limits(context.assembly, stop_after)
        self._first_step, self._started = self._progress.step, time.monotonic()

    def start(self) -> None:
        """This launch begins here and now."""
        self._first_step, self._started = self._progress.step, time.monotonic()

    def request(self) -> Request:
        """A stop, for whichever reason."""
        is_asked = self._signals.requested or self._file.exists() or self._is_shared
        return Request.STOP if is_asked or self._is_due else Request.NONE

    @property
    def _is_due(self) -> bool:
        """Whether the launch has had all that `train.stop_after` allows it."""
        steps, seconds = self._progress.step - self._first_step, time.monotonic() - self._started
        return (self._steps is not None and steps >= self._steps) or (
            self._seconds is not None and seconds >= self._seconds
        )

    @property
    def _is_shared(self) -> bool:
        return self._shared is not None and self._shared.exists()

    def reason(self, is_main: bool) -> str:
        """What asked for the stop; a file in the run directory has done its work then, and ``is_main`` removes it. One
        of several runs stays for the others."""
        asked = self._file.exists()
        if asked and is_main:
            self._file.unlink(missing_ok=True)
        if self._is_shared:
            other = f"{self._shared} (train.stop_file)"
        else:
            # The request was agreed on by all: it may be a tracker's, a hook's, or a signal that only another rank got.
            other = "stop_after" if self._is_due else "asked by a hook, a tracker or another process"
        return self._signals.signal_name or (STOP if asked else other)


def _limits(assembly: Assembly, limit: Duration | None) -> tuple[int | None, float | None]:
    """`train.stop_after` as steps of this launch, or as seconds; None for what does not limit it."""
    if limit is None:
        return None, None
    if limit.unit in TIMES:
        return None, limit.seconds
    return steps_of(limit, assembly.timetable.plan, assembly.prepared.train.tokens_per_row), None
