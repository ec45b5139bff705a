"""Durations turned into steps: how long a run is and when it evaluates and saves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile

import numpy as np
import numpy.typing as npt

from tuner.config.numbers import Duration
from tuner.config.recipe import TrainSection
from tuner.data.batch_sizes import BatchSizes, Change
from tuner.errors import RecipeError


@dataclass(frozen=True)
class Plan:
    """The computed length of a run."""

    rows: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    sizes: BatchSizes | None = None
    """The size of each step, where it changes."""

    def epoch_at(self, step: int) -> float:
        """Epochs finished after ``step`` steps."""
        if self.sizes is None:
            return step / self.steps_per_epoch
        place = self.sizes.place(step, self.rows)
        return place.epoch + place.start / self.rows

    def derivation(self, duration: Duration, row: str = "row") -> str:
        """How the number of steps follows: ``45 rows / 8 = 6 steps an epoch, 3 epochs = 18 steps``.

        An epoch's last batch may be smaller, so the epochs of a duration in steps or tokens are rounded. ``row`` is
        what a row is called.
        """
        rows, batch = f"{self.rows:,} {row}{'s' if self.rows != 1 else ''}", self.global_batch_size
        steps = f"{self.total_steps:,} step{'s' if self.total_steps != 1 else ''}"
        if duration.unit == "epochs" and self.sizes is None:
            per_epoch = f"{self.steps_per_epoch:,} step{'s' if self.steps_per_epoch != 1 else ''} an epoch"
            return f"{rows} / {batch} = {per_epoch}, {duration} = {steps}"
        derived = f"{steps} of {batch} row{'s' if batch != 1 else ''}"
        for after, size in () if self.sizes is None else self.sizes.changes:
            derived += f", {size} after step {after:,}"
        start = derived if duration.unit == "steps" else f"{duration} = {derived}"
        epochs = f"{self.epoch_at(self.total_steps):.2f}"
        return f"{start}, {epochs} epoch{'s' if epochs != '1.00' else ''} of {rows}"


def batch_sizes(train: TrainSection, row_tokens: npt.NDArray[np.int64]) -> BatchSizes | None:
    """The sizes of a run's steps where `train.batch_schedule` changes them. Raises RecipeError for one out of order."""
    found = BatchSizes(train.global_batch_size)
    for item in train.batch_schedule:
        after = plan_steps(item.after, row_tokens, found.first, found).total_steps
        if found.changes and after <= found.changes[-1].after:
            raise RecipeError(f"train.batch_schedule: {item.after} is step {after:,}, not after the change before it")
        found = BatchSizes(found.first, (*found.changes, Change(after, item.size)))
    return found if found.changes else None


def plan_steps(
    duration: Duration, row_tokens: npt.NDArray[np.int64], global_batch_size: int, sizes: BatchSizes | None = None
) -> Plan:
    """Compute the number of optimizer steps of a run over rows of the given token counts.

    A token duration ends with the step that reaches it, counted at the mean tokens of a row, so that it does not depend
    on the shuffled order.
    """
    rows = len(row_tokens)
    steps_per_epoch = math.ceil(rows / global_batch_size)
    if duration.unit == "steps":
        total = int(duration.count)
    elif sizes is not None and duration.unit in {"epochs", "tokens"}:
        total = sizes.steps(duration.count * rows / (1 if duration.unit == "epochs" else int(row_tokens.sum())), rows)
    elif duration.unit == "epochs":
        total = math.ceil(duration.count * steps_per_epoch)
    elif duration.unit == "tokens":
        total = math.ceil(duration.count * steps_per_epoch / int(row_tokens.sum()))
    else:
        raise RecipeError(f"{duration} is not a length of training", hint="write epochs, steps or tokens")
    return Plan(rows, global_batch_size, steps_per_epoch, total, sizes)


def steps_of(duration: Duration, plan: Plan, row_tokens: npt.NDArray[np.int64]) -> int:
    """A cadence or warm-up in whole steps, at least one."""
    if duration.unit == "%":
        return max(1, math.ceil(duration.share * plan.total_steps))
    return max(1, plan_steps(duration, row_tokens, plan.global_batch_size, plan.sizes).total_steps)


@dataclass(frozen=True)
class Cadence:
    """When something happens: every so many steps, and after so many seconds, whichever comes first."""

    every_steps: tuple[int, ...] = ()
    every_seconds: float | None = None
    at_steps: frozenset[int] = frozenset()
    """Steps at which it is due in any case."""

    def due_at(self, step: int) -> bool:
        """Whether ``step`` (from 1) is one of the cadence's."""
        return step in self.at_steps or any(step % n == 0 for n in self.every_steps)

    def due_after(self, seconds: float) -> bool:
        """Whether so many seconds since the last time are enough."""
        return self.every_seconds is not None and seconds >= self.every_seconds

    def or_of(self, other: "Cadence") -> "Cadence":
        """Due when this one or the other is."""
        seconds = [s for s in (self.every_seconds, other.every_seconds) if s is not None]
        steps = self.every_steps + other.every_steps
        return Cadence(steps, min(seconds, default=None), self.at_steps | other.at_steps)


def cadence(every: Sequence[Duration] | None, plan: Plan, row_tokens: npt.NDArray[np.int64]) -> Cadence:
    """Resolve ``every:`` of a recipe; None (written ``never``) is a cadence that is never due."""
    steps, seconds, at_steps = [], [], set[int]()
    for duration in every or ():
        if duration.unit in ("s", "min", "h"):
            seconds.append(duration.seconds)
        elif plan.sizes is not None and duration.unit in {"epochs", "tokens"}:  # no longer every so many steps
            times = (steps_of(replace(duration, count=duration.count * n), plan, row_tokens) for n in count(1))
            at_steps.update(takewhile(lambda step: step <= plan.total_steps, times))
        else:
            steps.append(steps_of(duration, plan, row_tokens))
    return Cadence(tuple(steps), min(seconds) if seconds else None, frozenset(at_steps))


def mark_steps(
    marks: Sequence[Duration], plan: Plan, row_tokens: npt.NDArray[np.int64], key: str = "checkpoint.marks"
) -> frozenset[int]:
    """The steps of the recipe's ``key``. Raises RecipeError for one after the run's end."""
    steps = frozenset(steps_of(mark, plan, row_tokens) for mark in marks)
    if steps and max(steps) > plan.total_steps:
        late = next(mark for mark in marks if steps_of(mark, plan, row_tokens) > plan.total_steps)
        raise RecipeError(
            f"{key}: {late} is step {max(steps):,}, the run ends at {plan.total_steps:,}",
            hint="remove it, or lengthen train.duration",
        )
    return steps
