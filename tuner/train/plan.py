"""The plan of a run: durations turned into steps, when it evaluates and saves, and the learning rate of each step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tuner.config import schedules as sections
from tuner.config.numbers import Duration
from tuner.config.recipe import TrainSection
from tuner.config.schedules import Schedule as Section
from tuner.data.batch_sizes import BatchSizes, Change
from tuner.errors import PluginError, RecipeError
from tuner.runtime.plugins import Plugin, load, naming, require_call, source_file


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
    steps = {steps_of(mark, plan, row_tokens): mark for mark in marks}
    if (last := max(steps, default=0)) > plan.total_steps:
        raise RecipeError(
            f"{key}: {steps[last]} is step {last:,}, the run ends at {plan.total_steps:,}",
            hint="remove it, or lengthen train.duration",
        )
    return frozenset(steps)


Shape = Literal["linear", "cosine", "sqrt", "inverse_sqrt"]


class Schedule(Protocol):
    """A factor on every peak learning rate by a 0-based index; training's first step uses index 1."""

    def factor(self, index: int) -> float:
        """The factor, 0 to 1, at ``index``, 0 to the number of steps."""
        ...

    def turns(self) -> list[tuple[int, str]]:
        """Indices at which something begins or ends, with what, for people."""
        ...


@dataclass(frozen=True)
class Decay:
    """A way down from 1 at ``start`` to ``floor`` at ``end``, both indices."""

    start: int
    end: int
    shape: Shape
    floor: float = 0.0
    peak: float = 1.0
    """By what all of its period is multiplied, from the end of the fall before."""

    @property
    def is_lost(self) -> bool:
        """Whether all of it is one step at a factor of 0."""
        return self.shape != "inverse_sqrt" and self.floor == 0 and self.end - self.start == 1

    def factor(self, index: int) -> float:
        """The factor at ``index``: 1 before the start, the floor from the end on."""
        if index <= self.start:
            return 1.0
        if self.shape == "inverse_sqrt":
            return math.sqrt(self.start / index)
        if index >= self.end:
            return self.floor
        progress = (index - self.start) / (self.end - self.start)
        match self.shape:
            case "linear":
                left = 1.0 - progress
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * progress))
            case "sqrt":
                left = 1.0 - math.sqrt(progress)
        return self.floor + (1.0 - self.floor) * left


@dataclass(frozen=True)
class WarmupDecay:
    """A linear warm-up from 0 at index 0, then 1 but for the decays; after each but the last it starts again at 1."""

    warmup_steps: int
    falls: tuple[Decay, ...] = ()

    def factor(self, index: int) -> float:
        """The factor at ``index``; where a fall begins within the warm-up, the lower of both."""
        risen = index / self.warmup_steps if index < self.warmup_steps else 1.0
        fall = next((fall for fall in self.falls if index <= fall.end), self.falls[-1] if self.falls else None)
        return risen if fall is None else fall.peak * min(risen, fall.factor(index))

    def turns(self) -> list[tuple[int, str]]:
        """The end of the warm-up, and where falls begin, end and start again."""
        found = [(self.warmup_steps, "warm-up ends")] if self.warmup_steps else []
        for number, fall in enumerate(self.falls):
            found.append((fall.start, "fall begins"))
            if fall.shape != "inverse_sqrt":
                found.append((fall.end, "fall ends"))
            if number + 1 < len(self.falls):
                found.append((fall.end + 1, "starts again"))
        return found


@dataclass(frozen=True)
class StartedLater:
    """A schedule that begins after so many steps of its run."""

    inner: Schedule
    steps: int

    def factor(self, index: int) -> float:
        """The factor at ``index``, which counts from the run's beginning."""
        return self.inner.factor(index - self.steps)

    def turns(self) -> list[tuple[int, str]]:
        """Those of the schedule, counted from the run's beginning."""
        return [(index + self.steps, what) for index, what in self.inner.turns()]


@dataclass(frozen=True)
class ScaledByBatch:
    """A schedule times the square root of how many times as large a step's batch is as the first one's."""

    inner: Schedule
    sizes: BatchSizes
    begun: int = 0
    """The step of the run after which the sizes count."""

    def factor(self, index: int) -> float:
        """The factor at ``index``, above 1 with larger batches."""
        size = self.sizes.place(max(0, index - 1 - self.begun), 1).size
        return self.inner.factor(index) * math.sqrt(size / self.sizes.first)

    def turns(self) -> list[tuple[int, str]]:
        """Those of the schedule, and where sizes change."""
        changes = [(after + 1 + self.begun, f"steps of {size} rows") for after, size in self.sizes.changes]
        return sorted([*self.inner.turns(), *changes])


def build_schedule(section: Section, plan: Plan, row_tokens: npt.NDArray[np.int64]) -> Schedule:
    """The schedule of a run of ``plan.total_steps`` steps.

    Raises RecipeError where its periods end before the run, PluginError for one of the user's own that does not fit.

    A fall to 0 at the end of the run reaches it one step later: a step at a learning rate of 0 would be thrown away.
    """
    if isinstance(section, sections.CustomSchedule):
        return own_schedule(section, plan.total_steps)
    warmup = 0 if section.warmup is None else steps_of(section.warmup, plan, row_tokens)
    total = plan.total_steps
    match section:
        case sections.ConstantSchedule():
            return WarmupDecay(warmup)
        case sections.InverseSqrtSchedule():
            return WarmupDecay(warmup, (Decay(max(1, warmup), total, "inverse_sqrt"),))
        case sections.LinearSchedule() | sections.CosineSchedule():
            floor = section.min_lr_ratio
            return WarmupDecay(warmup, (Decay(warmup, max(warmup, _end(total, floor)), section.kind, floor),))
        case sections.WsdSchedule():
            floor = section.min_lr_ratio
            start = max(0, total - steps_of(section.decay, plan, row_tokens))
            return WarmupDecay(warmup, (Decay(start, _end(total, floor), section.decay_shape, floor),))
        case sections.WsdPeriodsSchedule():
            return WarmupDecay(warmup, tuple(_periods(section, plan, row_tokens)))


def peak_factor(schedule: Schedule, first: int, last: int) -> float:
    """The largest factor of the steps from ``first`` to ``last``; of long runs some of them are tried."""
    turns = [index + near for index, _ in schedule.turns() for near in (-1, 0, 1)]
    tried = {*np.linspace(first, last, 1000).round().astype(int).tolist(), *turns}
    return max(schedule.factor(index) for index in tried if first <= index <= last)


def schedule_flaws(section: Section, plan: Plan, row_tokens: npt.NDArray[np.int64], known: bool = True) -> list[str]:
    """What of a schedule does not fit the run, each with the line to write: parts that are too long or overlap.

    With ``known`` false the plan's steps stand for parts of a run whose length is not known, and are not named.
    """
    if isinstance(section, sections.CustomSchedule):
        return []
    total, schedule = plan.total_steps, build_schedule(section, plan, row_tokens)
    assert isinstance(schedule, WarmupDecay), "those of tuner's own"

    def named(key: str, duration: Duration, steps: int) -> str:
        counted = known and duration.unit != "steps"
        return f"schedule.{key}: {duration}" + (f" ({steps:,} step{'s' if steps != 1 else ''})" if counted else "")

    run = f"the run of {total:,} step{'s' if total != 1 else ''}" if known else "the run"
    peak = f"the learning rate gets to {peak_factor(schedule, 1, total):.0%} of optimizer.lr"
    found, warmup = [], schedule.warmup_steps
    if section.warmup is not None and (warmup > total or warmup == total > 1):
        what = f"is longer than {run}: {peak}" if warmup > total else f"takes all of {run}, so that nothing follows it"
        found.append(f"{named('warmup', section.warmup, warmup)} {what}; write schedule.warmup: 3%")
    if isinstance(section, sections.WsdSchedule | sections.WsdPeriodsSchedule):
        periods = isinstance(section, sections.WsdPeriodsSchedule)
        if section.warmup is not None and not found and _overlap(schedule, total):
            parts = f"{named('warmup', section.warmup, warmup)} and schedule.decay: {section.decay}"
            lines = _without_overlap(section, plan, row_tokens)
            first = "the first period of " if periods else ""
            found.append(f"{parts} overlap in {first}{run}: {peak}; {lines}")
        short = [number for number, fall in enumerate(schedule.falls, 1) if fall.is_lost and fall.end <= total]
        if short:
            decay = f"schedule.decay: {section.decay} is one step in period {short[0]}"
            found.append(f"{decay}, at a learning rate of 0, which trains nothing; write schedule.min_lr_ratio: 0.1")
    return found


def _overlap(schedule: WarmupDecay, total: int) -> bool:
    """Whether the first fall begins before the warm-up ends; in a run of one step they are the same step."""
    return total > 1 and schedule.falls[0].start < schedule.warmup_steps


def _without_overlap(
    section: sections.WsdSchedule | sections.WsdPeriodsSchedule, plan: Plan, row_tokens: npt.NDArray[np.int64]
) -> str:
    """The lines to write in place of parts that overlap: as few as do."""
    usual = {"decay": Duration.parse("10%"), "warmup": Duration.parse("3%")}
    for keys in (("decay",), ("warmup",), ("decay", "warmup")):
        changed = section.model_copy(update={key: usual[key] for key in keys})
        schedule = build_schedule(changed, plan, row_tokens)
        if isinstance(schedule, WarmupDecay) and not _overlap(schedule, plan.total_steps):
            return "write " + " and ".join(f"schedule.{key}: {usual[key]}" for key in keys)
    return "write a longer first period, or schedule.warmup: never"


def check_schedule(section: Section) -> None:
    """Load a schedule of the user's own and check its signature. Raises PluginError; nothing is called."""
    if isinstance(section, sections.CustomSchedule):
        factory_of(section)


def _end(total: int, floor: float) -> int:
    return total if floor > 0 else total + 1


def _periods(section: sections.WsdPeriodsSchedule, plan: Plan, row_tokens: npt.NDArray[np.int64]) -> Iterator[Decay]:
    decay, end = section.decay, 0
    peaks = section.peaks or (1.0,) * len(section.periods)
    for length, peak in zip([steps_of(one, plan, row_tokens) for one in section.periods], peaks, strict=True):
        end += length
        steps = max(1, math.ceil(decay.share * length)) if decay.unit == "%" else steps_of(decay, plan, row_tokens)
        yield Decay(end - min(steps, length), end, section.decay_shape, section.min_lr_ratio, peak)
    if end < plan.total_steps:
        raise RecipeError(
            f"schedule.periods: they end after {end:,} steps, the run has {plan.total_steps:,}",
            hint="add a period, or shorten train.duration",
        )


# A schedule of the user's own: a function of the index, checked before it is used.

CHECKED = 1000
"""About so many indices of a run are tried before it begins, twice."""


@dataclass(frozen=True)
class OwnSchedule:
    """The user's function, whose results are looked at each time."""

    function: Callable[[int], float]
    use: str
    file: Path | None

    def factor(self, index: int) -> float:
        """What it returns for an index. Raises PluginError for anything but a number from 0 to 1."""
        with naming(f"schedule.use {self.use} failed at index {index}", self.file):
            found = self.function(index)
            value = float(found)
        if not 0 <= value <= 1:
            raise PluginError(
                f"schedule.use {self.use} gave {found} at index {index}, not a factor from 0 to 1",
                hint="the learning rate is optimizer.lr times the factor; raise that instead",
            )
        return value

    def turns(self) -> list[tuple[int, str]]:
        """None that are known."""
        return []


def own_schedule(section: sections.CustomSchedule, total_steps: int) -> OwnSchedule:
    """Call what ``use`` names with the number of steps and the options, and try the function that it gives.

    Raises PluginError where it is not there or fails, and for a function whose results are no factors, or differ from
    one call to the next.
    """
    factory = factory_of(section)
    file = source_file(factory)
    with naming(f"schedule.use {section.use} could not be built", file):
        function = factory(total_steps, **section.options)
    if not callable(function):
        raise PluginError(f"schedule.use {section.use} gave a {type(function).__name__}, not a function of the index")
    found = OwnSchedule(function, section.use, file)
    indices = range(0, total_steps + 1, max(1, total_steps // CHECKED))
    first = [found.factor(index) for index in indices]
    for index, before in reversed(list(zip(indices, first, strict=True))):
        if (again := found.factor(index)) != before:
            raise PluginError(
                f"schedule.use {section.use} gave {before:g} and then {again:g} at index {index}",
                hint="the factor must depend on the index alone, so that a resumed run continues with it",
            )
    return found


def factory_of(section: sections.CustomSchedule) -> Plugin:
    """What ``use`` names, once it is seen to take the steps and the options. Raises PluginError; nothing is called."""
    factory = load(section.use, "tuner.schedules")
    require_call(factory, section.use, ("total_steps",), section.options)
    return factory
