"""The tasks that tell the person at the terminal how the run is getting on: where the time until the first step went, a
line of the newest step, and how long the run still takes.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from math import lcm
from typing import Any, Literal

from tuner.config.methods import LoggedFigure
from tuner.config.numbers import Duration
from tuner.config.recipe import EvalSection
from tuner.rundir.directory import RunDir
from tuner.rundir.records import Records
from tuner.runtime import startup
from tuner.runtime.console import Console, ProgressBar, clock
from tuner.setup.timetable import Timetable
from tuner.train.plan import Cadence
from tuner.train.progress import Progress
from tuner.train.tasks import Event, Request, TakenStep, Task

NEWEST = 20
"""Steps whose mean is the pace of those to come."""
Work = Literal["evaluation", "samples", "save"]


@dataclass(frozen=True)
class Due:
    """What is due in a run besides steps, and when."""

    total_steps: int
    evaluation: Cadence
    evaluates_at_end: bool
    samples_always: bool
    """Answer prompts at every evaluation, and not at the first and last step alone."""
    saving: Cadence
    marks: frozenset[int]
    saves_at_end: bool

    @staticmethod
    def of(table: Timetable, settings: EvalSection, has_held_out: bool, saves_at_end: bool) -> "Due":
        """What is due in a run of this timetable."""
        return Due(
            table.plan.total_steps, reduce(Cadence.or_of, table.tasks, table.evaluation),
            (has_held_out or bool(settings.tasks)) and settings.at_end, settings.samples_at == "all", table.saving,
            table.keeping.at_steps, saves_at_end,
        )

    def after(self, step: int) -> dict[Work, int]:
        """How often each is due after ``step``, what the clock asks for left out."""
        last = self.total_steps
        often = self.evaluation.every_steps
        evaluations = due_steps(often, step, last)
        evaluations += sum(step < at <= last and all(at % n for n in often) for at in self.evaluation.at_steps)
        at_last = step < last and (self.evaluates_at_end or self.evaluation.due_at(last))
        evaluations += at_last and not self.evaluation.due_at(last)
        saves = due_steps(self.saving.every_steps, step, last - 1)
        saves += sum(step < mark < last and not self.saving.due_at(mark) for mark in self.marks)
        saves += step < last and self.saves_at_end
        return {"evaluation": evaluations, "samples": evaluations if self.samples_always else at_last, "save": saves}


def due_steps(every: Collection[int], after: int, last: int) -> int:
    """Steps in (after, last] that are multiples of any number of ``every``."""
    periods: Sequence[int] = sorted(set(every))
    count = 0
    for size in range(1, len(periods) + 1):
        sign = 1 if size % 2 else -1
        count += sign * sum(max(0, last // lcm(*some) - after // lcm(*some)) for some in combinations(periods, size))
    return count


@dataclass
class TimeLeft:
    """Estimates from what steps and other work took in this launch; what was not yet measured counts for nothing."""

    due: Due
    took: dict[Work, float] = field(default_factory=dict)
    """Seconds that each took last."""
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    _is_warm: bool = False

    def stepped(self, seconds: float) -> None:
        """A step took so long; the first one of a launch is slower than those after it."""
        if len(self._steps) == 1 and not self._is_warm:
            self._is_warm = True
            self._steps.clear()
        self._steps.append(seconds)

    def seconds(self, step: int) -> float | None:
        """Seconds from ``step`` to the end of the run; None before the first step of a launch."""
        if not self._steps:
            return None
        left = (self.due.total_steps - step) * sum(self._steps) / len(self._steps)
        counts = self.due.after(step)
        left += sum(counts[work] * self.took.get(work, 0.0) for work in ("evaluation", "samples"))
        by_clock = 0.0 if self.due.saving.every_seconds is None else left // self.due.saving.every_seconds
        return left + (counts["save"] + by_clock) * self.took.get("save", 0.0)


SHOWN_FIGURES = 2
"""Figures of a method that have a column: its first ones. MFU and the wait for data give way to them."""


@dataclass(frozen=True)
class Column:
    """A number of a step's line, and how it is shown."""

    name: str
    heading: str
    width: int
    form: str = ""
    """As `format` takes it; empty for as many digits as fit."""
    is_measured: bool = False
    """Whether evaluations have it, too."""

    def cell(self, value: float | None, none: str = "-") -> str:
        """What stands in the column, after a space."""
        form = self.form or ("," if isinstance(value, int) else "")
        text = none if value is None else format(value, form) if form else _brief(value)
        return f" {text:>{self.width}}"


_KNOWN = {
    column.name: column
    for column in (
        Column("grad_norm", "grad", 8, ".3f"),
        Column("lr", "lr", 10, ".2e"),
        Column("tok_per_s", "tok/s", 9, ",.0f"),
        Column("mfu", "mfu", 6, ".1%"),
        Column("data_wait", "wait", 6, ".1%"),
    )
}


def columns_of(figures: Mapping[str, LoggedFigure], chosen: Sequence[str] = ()) -> tuple[Column, ...]:
    """The columns between the losses and the time left: those that are ``chosen``, or the usual ones, which fit a
    terminal of 80, with the method's first figures next to its loss."""
    own = {name: Column(name, figure.heading, 7, is_measured=True) for name, figure in figures.items()}
    shown = list(own)[:SHOWN_FIGURES]
    names = chosen or (*shown, "grad_norm", "lr", "tok_per_s", *(() if shown else ("mfu", "data_wait")))
    known = own | _KNOWN
    return tuple(known.get(name) or Column(name, name, max(7, len(name))) for name in names)


class ConsoleTask(Task):
    """Prints a line of the newest step, and writes the records so far, ``every`` so many seconds or steps.

    An evaluation or a save is printed after the line of the step that it follows.
    """

    def __init__(
        self, console: Console, records: Records, every: Duration, progress: Progress, time_left: TimeLeft,
        compiles: bool = False, columns: Sequence[Column] = columns_of({}),
    ) -> None:
        self._console, self._records = console, records
        self._steps = int(every.count) if every.unit == "steps" else None
        self._refresh_s = math.inf if self._steps is not None else every.seconds
        self._progress, self._time_left = progress, time_left
        self._open = ExitStack()
        self._bar: ProgressBar | None = None
        self._last_shown = time.monotonic()
        self._line: Mapping[str, Any] | None = None
        self._shown_step = 0
        self._columns = tuple(columns)
        self._measured = self._columns[: max((i + 1 for i, one in enumerate(columns) if one.is_measured), default=0)]
        self._header_shown = False
        self._first = "compiling the decoder layers in the first step" if compiles else "training the first step"
        self._is_first = True

    def start(self) -> None:
        """Show the bar and start the clock."""
        total = self._progress.plan.total_steps
        self._bar = self._open.enter_context(self._console.progress("train", total, estimates=False))
        self._bar.update(self._progress.step)
        self._last_shown = time.monotonic()

    def around_step(self, number: int) -> AbstractContextManager[object]:
        """Say what takes longer than the other steps."""
        if number == 0:
            return self._console.doing("trying the largest micro-batch")
        is_first, self._is_first = self._is_first, False
        return self._console.doing(self._first) if is_first else nullcontext()

    def notify(self, event: Event) -> None:
        """Keep the newest step; print an evaluation or a save, after the step's line."""
        if event.stage == "step":
            self._line = event.metrics
            if self._steps is not None and event.step % self._steps == 0:
                self._show()
                self._records.flush()
            if "reason" not in event.metrics:  # else nothing was computed
                self._time_left.stepped(event.metrics["step_s"])
        elif event.stage == "evaluation":
            samples_s = float(event.metrics.get("samples_s", 0.0))
            self._time_left.took["evaluation"] = float(event.metrics.get("eval_s", 0.0)) - samples_s
            if samples_s:
                self._time_left.took["samples"] = samples_s
            self._show()
            self._show_evaluation(event)
        elif event.stage == "save":
            self._show()
            best = self._progress.best
            is_best = best is not None and best.step == event.step
            self._console.say("saved", f"{event.path}{' (best so far)' if is_best else ''}")

    def between_steps(self, agreed: Request) -> None:
        """Print and write where it is time."""
        if time.monotonic() - self._last_shown >= self._refresh_s:
            self._show()
            self._records.flush()

    def finish(self, finished: bool) -> None:
        """Print and write what is left."""
        self.close()
        self._records.sync()

    def close(self) -> None:
        """Print and write what is left."""
        self._show()
        self._open.close()
        self._records.flush()

    def _show(self) -> None:
        """Print the newest step, unless it was printed before."""
        self._last_shown = time.monotonic()
        line = self._line
        if line is None or line["step"] == self._shown_step:
            return
        self._shown_step = line["step"]
        self._show_header()
        loss, left = _shown(line["loss"]), self._left(line["step"])
        cells = "".join(one.cell(line.get(one.name), "none" if one.name in line else "-") for one in self._columns)
        self._console.line(f"{line['step']:>6} {loss:>8} {'':>8}{cells} {left:>8}")
        if self._bar is not None:
            self._bar.lengthen(self._progress.plan.total_steps)
            self._bar.update(line["step"], f"loss {loss}  {line['tok_per_s']:,.0f} tok/s  {left} left")

    def _left(self, step: int) -> str:
        seconds = self._time_left.seconds(step)
        return "-" if seconds is None else clock(seconds)

    def _show_evaluation(self, event: Event) -> None:
        """Print an evaluation, below it those of its sources."""
        self._show_header()
        for name, loss in event.metrics.items():
            kind, _, source = name.partition("/")
            if kind != "loss":
                continue
            own = self._own(event.metrics, "{}/" + source if source else "{}")
            none = "".join(one.cell(None) for one in self._columns[len(self._measured) :])
            at, rest = ("", f" {source}") if source else (event.step, f"{none} {self._left(event.step):>8}")
            self._console.line(f"{at:>6} {'' if source else '-':>8} {_shown(loss):>8}{own}{rest}")
        if "ema/loss" in event.metrics:
            own = self._own(event.metrics, "ema/{}")
            self._console.line(f"{'':>6} {'':>8} {_shown(event.metrics['ema/loss']):>8}{own} averaged weights")

    def _own(self, line: Mapping[str, Any], named: str) -> str:
        """The columns up to the last figure of the method, with what a line has by such names."""
        return "".join(one.cell(line.get(named.format(one.name))) for one in self._measured)

    def _show_header(self) -> None:
        if not self._header_shown:
            names = "".join(f" {one.heading:>{one.width}}" for one in self._columns)
            self._console.line(f"{'step':>6} {'loss':>8} {'eval':>8}{names} {'left':>8}")
            self._header_shown = True


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f}"


def _brief(value: float) -> str:
    """A figure in at most 7 letters, as long as it has no more than six digits before its point."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 10_000 else f"{value:.0f}"


class StartupTask(Task):
    """Rank 0's; the host's time, which waits for compilers and for what a first step loads, and not for the step."""

    def __init__(self, run: RunDir, record: dict[str, Any], console: Console, compiles: bool) -> None:
        self._run, self._record, self._console = run, record, console
        self._first = "compiling" if compiles else "first step"

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """What the first step and the mock batch before it take is their own."""
        return startup.phase(self._first)

    def step_taken(self, taken: TakenStep) -> None:
        """Say it once."""
        if startup.is_begun() and not taken.skipped_by_recipe:
            seconds, remarks = startup.end()
            self._console.say("start", startup.in_words(seconds, remarks))
            self._run.note_start(self._record, seconds)
