"""The steps of a run and what is due at each: the plan, the schedule and the cadences.

Where data come in portions, the rows of later ones are not known, so the tokens of a duration are counted in full rows.
Where `train.duration` is in epochs, each portion is trained so often and the length of the run is not known: its
schedule needs none then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tuner.config.numbers import Duration
from tuner.config.recipe import Recipe
from tuner.data.prepared import PreparedData
from tuner.errors import RecipeError, counted
from tuner.setup.settled import rows_at_once
from tuner.train import plan as planning
from tuner.train.plan import Cadence, Plan, Schedule, build_schedule, mark_steps, plan_steps, schedule_flaws

if TYPE_CHECKING:
    from tuner.data.prepared import PackedRows
    from tuner.setup.resolve import Resolved


@dataclass(frozen=True)
class Starts:
    """The step after which each part of a run was last reset, and the updates before its optimizer's state was."""

    schedule: int = 0
    data: int = 0
    rng: int = 0
    updates: int = 0
    portion: int = 0
    """Of data in portions: which one is trained, from 0; ``data`` is the step before its first."""


@dataclass(frozen=True)
class Timetable:
    """The computed course of a run."""

    plan: Plan
    schedule: Schedule
    evaluation: Cadence
    saving: Cadence
    """When checkpoints are saved, those that are never pruned among them, but for single steps of these."""
    keeping: Cadence
    """Steps whose checkpoints are never pruned."""
    exporting: Cadence
    """An export needs a checkpoint: each of its steps is one of `saving`, too."""
    data_start: int = 0
    """The step after which the data was reset."""
    tasks: tuple[Cadence, ...] = ()
    """When each task of `eval.tasks` is scored, besides at the run's ends."""
    apart: int = 0
    """Steps around one whose checkpoint is never pruned in which no other is saved."""

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint after a step is never pruned."""
        return self.keeping.due_at(step)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, whatever the clock says."""
        if self.is_kept(step) or self.exporting.due_at(step):
            return True
        return self.saving.due_at(step) and not self.is_near_kept(step)

    def is_near_kept(self, step: int) -> bool:
        """Whether a checkpoint that is never pruned is so near that none is saved by `checkpoint.every`."""
        near = range(max(1, step - self.apart), step + self.apart + 1)
        return self.apart > 0 and any(self.is_kept(other) for other in near)


FEW_STEPS = 20
"""Fewer optimizer steps in a whole run than this are warned of."""


def few_steps(recipe: Recipe, plan: Plan) -> str | None:
    """The warning of a run with hardly any steps, with what to change; None where it has enough.

    Steps that the recipe itself counts are what was wanted.
    """
    duration = recipe.train.duration
    if plan.total_steps >= FEW_STEPS or duration.unit == "steps" or recipe.data.portions:
        return None
    ways, micro = [], rows_at_once(recipe.train)
    if plan.global_batch_size > micro:
        seen = plan.rows * plan.total_steps / plan.steps_per_epoch
        smaller = min(int(seen / FEW_STEPS), plan.global_batch_size - 1) // micro * micro  # micro-batches divide it
        if smaller:  # else even the smallest batch is few steps
            ways.append(f"train.global_batch_size: {smaller}")
    if duration.unit == "epochs":
        longer = math.ceil(FEW_STEPS / plan.steps_per_epoch)
        ways.append(f"train.duration: {longer} epochs")
    else:
        ways.append("a longer train.duration")
    steps = counted(plan.total_steps, "step")
    return f"the whole run is {steps}, which teach a model little; write {' or '.join(ways)}, or take more data"


@dataclass(frozen=True)
class Rates:
    """The learning rate of a run: as it is written, the highest that a step gets, and what of the schedule is wrong."""

    written: float
    highest: float
    flaws: list[str]

    def __str__(self) -> str:
        """In a few words: where no step gets to what is written, how far they get."""
        return f"{self.written:g}" if self.highest == self.written else f"up to {self.highest:.3g} of {self.written:g}"


def rates(resolved: Resolved, prepared: PreparedData, table: Timetable, starts: Starts) -> Rates:
    """The learning rate over a run; of portions whose end is not known, nothing is said of the schedule."""
    recipe, extent = resolved.recipe, extent_of(resolved, prepared.train, starts.data)
    written, limit = float(recipe.optimizer.lr), extent.limit
    if limit is None:
        return Rates(written, written, [])
    highest = written * planning.peak_factor(table.schedule, starts.schedule + 1, limit)
    rest = replace(table.plan, total_steps=limit - starts.schedule)
    return Rates(written, highest, schedule_flaws(recipe.schedule, rest, extent.tokens))


def timetable(resolved: Resolved, prepared: PreparedData, starts: Starts = Starts()) -> Timetable:  # noqa: B008 - frozen
    """The steps of a resolved recipe over prepared data; a schedule that was reset runs over the steps after that.

    Of data in portions the plan is that of the rows that are there; what is due when, and the learning rate, are those
    of the whole run. Raises RecipeError for a duration that cannot be.
    """
    recipe = resolved.recipe
    extent = extent_of(resolved, prepared.train, starts.data)
    whole, tokens, limit = extent.whole, extent.tokens, extent.limit
    begun = max(starts.schedule, starts.rng, 0 if recipe.data.portions else starts.data)
    if limit is not None and limit <= begun:
        raise RecipeError(f"train.duration: no steps of {limit} are left", hint="lengthen it")

    def due(every: Sequence[Duration] | None) -> Cadence:
        # Shares of a run whose length is not known are those of a default: others are refused.
        return planning.cadence([one for one in every or () if limit is not None or one.unit != "%"], whole, tokens)

    kept = due(recipe.checkpoint.keep_every)
    marks = mark_steps(recipe.checkpoint.marks, extent.longest, tokens) | ({0} if recipe.checkpoint.at_start else set())
    evaluated, exporting = prepared.eval is not None or recipe.eval.tasks, due(recipe.export.every)
    evaluation = due(recipe.eval.every if evaluated else None)
    if evaluated and recipe.eval.marks:
        evaluation = replace(evaluation, at_steps=mark_steps(recipe.eval.marks, extent.longest, tokens, "eval.marks"))
    return Timetable(
        extent.plan, run_schedule(recipe, whole, tokens, starts), evaluation,
        due(recipe.checkpoint.every).or_of(exporting).or_of(kept), replace(kept, at_steps=marks), exporting,
        starts.data, tuple(evaluation if task.every is None else due(task.every) for task in recipe.eval.tasks),
        recipe.checkpoint.not_within or 0,
    )


def run_schedule(
    recipe: Recipe, plan: Plan, row_tokens: npt.NDArray[np.int64], starts: Starts = Starts()  # noqa: B008 - frozen
) -> Schedule:
    """The learning rate over a run, or over the steps after it was reset."""
    start = starts.schedule
    rest = replace(plan, total_steps=max(1, plan.total_steps - start))
    found: Schedule = build_schedule(recipe.schedule, rest if start else plan, row_tokens)
    found = planning.StartedLater(found, start) if start else found
    if plan.sizes is None or not recipe.train.batch_scales_lr:
        return found
    return planning.ScaledByBatch(found, plan.sizes, starts.data)


@dataclass(frozen=True)
class PortionPlans:
    """The plans of the portions of a run's data."""

    resolved: Resolved

    @property
    def limit(self) -> int | None:
        """The steps after which the run ends whatever portions are left; None where its portions decide."""
        return None if self.resolved.recipe.has_open_end else self.full.total_steps

    @property
    def passes(self) -> int | None:
        """How often the run goes over all portions; None: as often as its steps want."""
        portions = self.resolved.recipe.data.portions
        return 1 if portions is None else portions.passes_in(self.resolved.recipe.train.duration)

    @property
    def full(self) -> Plan:
        """The plan of a run whose rows are all full."""
        train = self.resolved.recipe.train
        rows = np.full(train.global_batch_size, int(self.resolved.recipe.data.max_length), dtype=np.int64)
        return plan_steps(train.duration, rows, train.global_batch_size)

    def plan(self, rows: int, first_step: int) -> Plan:
        """That of a portion of so many rows that begins after ``first_step`` steps; its steps count from the run's."""
        train, limit = self.resolved.recipe.train, self.limit
        batch, duration = train.global_batch_size, train.duration
        per_epoch = math.ceil(rows / batch)
        # An epoch is one of a portion by itself, or a pass over all, which comes to it once.
        epochs = duration.count / (self.passes or 1)
        steps = math.ceil(epochs * per_epoch) if duration.unit == "epochs" else per_epoch
        last = first_step + steps if limit is None else min(first_step + steps, limit)
        return Plan(rows, batch, per_epoch, last)

    def check(self) -> None:
        """Raise RecipeError where the model at the start would be asked about portions that come later."""
        portions = self.resolved.recipe.data.portions
        if portions is not None and getattr(self.resolved.recipe.method, "reference", None) == "columns":
            raise RecipeError(
                f"data.{portions.noun}s: the reference's columns are computed before the first step, for all data",
                hint=f"train an adapter, with method.reference: adapter_off, or remove data.{portions.noun}s",
            )

    def words(self, plan: Plan, first_step: int) -> str:
        """The plan of a portion that begins after ``first_step`` steps, for people."""
        limit, rows = self.limit, f"{counted(plan.rows, 'row')} / {plan.global_batch_size}"
        steps = f"steps {first_step + 1:,} to {plan.total_steps:,}"
        return f"{rows} = {steps}" + ("" if limit is None else f" of at most {limit:,}")


@dataclass(frozen=True)
class Extent:
    """How long a run is, as far as that is known."""

    plan: Plan
    """The steps on the rows that are there; they count from the run's."""
    whole: Plan
    """Those of the whole run, by which its schedule and cadences go."""
    tokens: npt.NDArray[np.int64]
    """Of each row of ``whole``."""
    limit: int | None
    """The step with which the run ends; None where later portions decide."""

    @property
    def longest(self) -> Plan:
        """The whole run; where its end is not known, no step is known to be too late."""
        return self.whole if self.limit is not None else replace(self.whole, total_steps=2**53)


def extent_of(resolved: Resolved, rows: PackedRows, first_step: int) -> Extent:
    """The extent of a resolved run over such rows; those of a portion begin after ``first_step`` steps."""
    recipe = resolved.recipe
    if recipe.data.portions is None:
        sizes = planning.batch_sizes(recipe.train, rows.tokens_per_row)
        plan = plan_steps(recipe.train.duration, rows.tokens_per_row, recipe.train.global_batch_size, sizes)
        return Extent(plan, plan, rows.tokens_per_row, plan.total_steps)
    plans = PortionPlans(resolved)
    plan, limit = plans.plan(len(rows), first_step), plans.limit
    whole = replace(plans.full, total_steps=limit or plan.total_steps)
    return Extent(plan, whole, np.full(whole.rows, int(recipe.data.max_length), dtype=np.int64), limit)
