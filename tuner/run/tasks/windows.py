"""The task that prepares the next window of data next to training, and opens it when the current one is trained."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile

from tuner.config.load import recipe_dict
from tuner.errors import TunerError, counted
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.console import TimeLeft
from tuner.run.tasks.log import LogTask
from tuner.run.windows.finder import Finder, OpenedWindows, PreparedBeside, WindowLook, waited
from tuner.rundir.layout import PORTIONS_LOG
from tuner.rundir.windows import WindowEntry, write_windows
from tuner.runtime import phase
from tuner.runtime.process import Collective, any_rank, gloo_group
from tuner.setup.resolve import recipe_again
from tuner.setup.timetable import PortionPlans
from tuner.train.tasks import Event, Request, TakenStep, Task

LOOK_S = 1.0
"""Time between two looks for the next window while one is trained."""


class WindowTask(Task):
    """Goes over from each window to the next one, after its evaluation and its save; the last task of a step.

    Rank 0 has the finder. What keeps a window from being prepared is said at once, and raised when training needs it:
    by then the current window is trained and saved.
    """

    def __init__(
        self, context: LaunchContext, windows: OpenedWindows, log: LogTask, request: Callable[[], Request],
        time_left: TimeLeft,
    ) -> None:
        self._context, self._windows = context, windows
        self._progress, self._console = context.progress, context.console
        self._log, self._request, self._time_left = log, request, time_left
        self._finder = _finder(context, windows) if context.assembly.rank_info.is_main else None
        self._looked_at = time.monotonic()
        self._said, self._trained = "", 0

    def start(self) -> None:
        """Say which window is open, and begin to prepare the one after it."""
        self._say_opened(self._windows.position.current, 0.0)
        self._look_ahead()

    def step_taken(self, taken: TakenStep) -> None:
        """Look for the next window now and then."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._look_ahead()

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Open the next window where this one is done; it is waited for. Collective."""
        if self._progress.is_last_step:
            name = {"window": self._windows.position.number + 1, "name": self._windows.position.current.name}
            yield Event("window", self._progress.step, self._progress.tokens, name)
            self._end_launch()
        if Request.STOP not in agreed and self._progress.is_last_step and not self._progress.is_over:
            phase.enter("wait for the next window")
            yield from self._log.flush()
            with self._log.clock.pause():
                self._go_over()

    def finish(self, finished: bool) -> None:
        """Leave what is being prepared."""
        self.close()

    def close(self) -> None:
        """Leave what is being prepared."""
        if self._finder is not None:
            self._finder.end()

    def _end_launch(self) -> None:
        """End the launch where it has trained its windows, and others may follow. Collective."""
        most = self._windows.spec.data.windows.per_launch
        self._trained += 1
        if most is None or self._trained < most or self._progress.is_over:
            return
        if Collective(gloo_group()).on_rank0(self._may_follow):
            self._progress.awaiting = f"{counted(most, 'window')} a launch (data.windows.per_launch)"
            self._console.say("ending", f"{self._progress.awaiting}; the run can be resumed")

    def _may_follow(self) -> bool:
        """Whether a window may follow: one that cannot be prepared does, and is the next launch's to refuse."""
        with suppress(TunerError):
            return self._look(overdue=False).found.kind != "ended"
        return True

    def _look_ahead(self) -> None:
        self._looked_at = time.monotonic()
        if self._finder is None:
            return
        try:
            self._finder.look()
        except TunerError as error:
            if error.message != self._said:
                self._said = error.message
                self._console.warn(f"{error.message}; training continues to the end of the window before it")

    def _go_over(self) -> None:
        """Open the next window, or note that there is none, or that it did not come. Collective."""
        progress, started = self._progress, time.monotonic()
        look = self._wait()
        waited = time.monotonic() - started
        match look.found.kind:
            case "ready":
                self._windows.open(look.found.entry, look.entries, self._context.assembly, progress)
                opened = self._windows.position.current
                Collective(gloo_group()).on_rank0(lambda: self._note_opened(opened))
                self._say_opened(opened, waited)
            case "ended":
                progress.more_to_come = False
                if (limit := PortionPlans(self._context.assembly.resolved).limit) is not None:
                    self._console.warn(f"the windows end after step {progress.step:,} of {limit:,} (train.duration)")
            case _:
                progress.awaiting = look.found.words
                self._console.say("waiting", f"{look.found.words}; the run can be resumed")

    def _wait(self) -> WindowLook:
        """Look until the next window is ready, there is none, it was waited for long enough, or a signal came."""
        wait, ranks = self._windows.spec.data.windows.wait, Collective(gloo_group())
        with self._console.doing("waiting for the next window") as doing:
            return waited(
                lambda overdue: ranks.on_rank0(partial(self._look, overdue)), 0.0 if wait is None else wait.seconds,
                doing, lambda: any_rank(Request.STOP in self._request(), gloo_group()),
            )  # fmt: skip

    def _look(self, overdue: bool) -> WindowLook:
        assert self._finder is not None  # on rank 0
        return self._finder.seen(overdue)

    def _note_opened(self, entry: WindowEntry) -> None:
        assert self._finder is not None  # on rank 0
        write_windows(self._context.run.path, self._finder.opened(entry))
        self._look_ahead()

    def _say_opened(self, entry: WindowEntry, waited: float) -> None:
        self._time_left.due = replace(self._time_left.due, total_steps=entry.last_step)
        number = self._windows.position.number
        left_out = _left_out_before(self._windows.position.decided[:-1])
        self._console.say(
            "window",
            f"{number + 1}, {entry.name}: {counted(entry.rows, 'row')}, "
            f"steps {entry.first_step + 1:,} to {entry.last_step:,}"
            + (f" (waited {waited:.1f} s)" if waited >= 1 else "")
            + (f"; left out before it: {left_out}" if left_out else ""),
        )


def _finder(context: LaunchContext, windows: OpenedWindows) -> Finder:
    """What looks for the windows after the current one, and notes those that are left out; on rank 0."""
    position, run = windows.position, context.run
    preparation = PreparedBeside(recipe_dict(recipe_again(context.assembly.resolved, {})), run.logs / PORTIONS_LOG)
    known = position.entries[position.number + 1 :]
    note = lambda entries: write_windows(run.path, entries)  # noqa: E731
    passes = PortionPlans(context.assembly.resolved).passes
    return Finder(windows.spec, preparation, position.decided, known, note, passes=passes)


def _left_out_before(decided: Sequence[WindowEntry]) -> str:
    """The windows just before that were left out, in words."""
    newest_first = takewhile(lambda entry: entry.left_out, reversed(decided))
    return ", ".join(reversed([f"{entry.name} ({entry.left_out})" for entry in newest_first]))
