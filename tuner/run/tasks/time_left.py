"""How long a run still takes: its steps, and the evaluations, samples and saves that are due between them."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from math import lcm
from typing import Literal

from tuner.config.recipe import EvalSection
from tuner.setup.timetable import Timetable
from tuner.train.plan import Cadence

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
            table.plan.total_steps,
            reduce(Cadence.or_of, table.tasks, table.evaluation),
            (has_held_out or bool(settings.tasks)) and settings.at_end,
            settings.samples_at == "all",
            table.saving,
            table.keeping.at_steps,
            saves_at_end,
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
