"""The task that says at the first step where the time until then went, and notes it in the run's record."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tuner.rundir.directory import RunDir
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.train.tasks import TakenStep, Task


class StartupTask(Task):
    """Rank 0's; the host's time, which waits for compilers and for what a first step loads, and not for the step."""

    def __init__(self, run: RunDir, record: dict[str, Any], console: Console, compiles: bool) -> None:
        self._run, self._record, self._console = run, record, console
        self._first = "compiling" if compiles else "first step"

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """What the first step and the mock batch before it take is their own."""
        return startup.phase(self._first) if startup.is_begun() else nullcontext()

    def step_taken(self, taken: TakenStep) -> None:
        """Say it once."""
        if startup.is_begun() and not taken.left_out:
            seconds, remarks = startup.end()
            self._console.say("start", startup.in_words(seconds, remarks))
            self._run.note_start(self._record, seconds)
