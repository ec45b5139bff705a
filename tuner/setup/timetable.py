"""The steps of a run and what is due at each: the plan, the schedule and the cadences."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tuner.config.recipe import Recipe
from tuner.data.prepared import PackedRows, PreparedData
from tuner.errors import RecipeError
from tuner.setup.settled import rows_at_once
from tuner.train.plan import Cadence, Plan, cadence, mark_steps, plan_steps
from tuner.train.schedule import Schedule, StartedLater, build_schedule, peak_factor, schedule_flaws

if TYPE_CHECKING:
    from tuner.setup.resolve import Resolved


@dataclass(frozen=True)
class Starts:
    """The step after which each part of a run was last reset, and the updates before its optimizer's state was."""

    schedule: int = 0
    data: int = 0
    rng: int = 0
    updates: int = 0
    window: int = 0
    """Of data in windows: which one is at hand; ``data`` is the step before its first."""


@dataclass(frozen=True)
class Timetable:
    """The computed course of a run."""

    plan: Plan
    schedule: Schedule
    evaluation: Cadence
    saving: Cadence
    marks: frozenset[int]
    """Steps whose checkpoints are never pruned."""
    exporting: Cadence
    """An export needs a checkpoint: each of its steps is one of `saving`, too."""
    data_start: int = 0
    """The step after which the data was reset."""
    tasks: tuple[Cadence, ...] = ()
    """When each task of `eval.tasks` is scored, besides at the run's ends."""


FEW_STEPS = 20
"""Fewer optimizer steps in a whole run than this are warned of."""


def few_steps(recipe: Recipe, plan: Plan) -> str | None:
    """The warning of a run with hardly any steps, with what to change; None where it has enough.

    Steps that the recipe itself counts are what was wanted.
    """
    duration = recipe.train.duration
    if plan.total_steps >= FEW_STEPS or duration.unit == "steps" or recipe.data.windows.is_on:
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
    steps = f"{plan.total_steps} step{'' if plan.total_steps == 1 else 's'}"
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


def rates(resolved: "Resolved", prepared: PreparedData, table: Timetable, starts: Starts) -> Rates:
    """The learning rate over a run; of windows whose end is not known, nothing is said of the schedule."""
    recipe, plan, tokens = resolved.recipe, table.plan, prepared.train.tokens_per_row
    written = float(recipe.optimizer.lr)
    if recipe.data.windows.is_on:
        from tuner.setup.window_course import total_steps

        limit = total_steps(recipe)
        if limit is None:
            return Rates(written, written, [])
        plan = replace(plan, total_steps=limit)
        tokens = np.full(plan.global_batch_size, int(recipe.data.max_length), dtype=np.int64)
    highest = written * peak_factor(table.schedule, starts.schedule + 1, plan.total_steps)
    rest = replace(plan, total_steps=plan.total_steps - starts.schedule)
    return Rates(written, highest, schedule_flaws(recipe.schedule, rest, tokens))


def timetable(resolved: "Resolved", prepared: PreparedData, starts: Starts = Starts()) -> Timetable:  # noqa: B008 - frozen
    """The steps of a resolved recipe over prepared data; a schedule that was reset runs over the steps after that.

    Raises RecipeError for a duration that cannot be.
    """
    recipe = resolved.recipe
    if recipe.data.windows.is_on:
        return _of_windows(recipe, prepared.train, starts)
    tokens = prepared.train.tokens_per_row
    plan = plan_steps(recipe.train.duration, tokens, recipe.train.global_batch_size)
    if plan.total_steps <= max(starts.schedule, starts.data, starts.rng):
        raise RecipeError(f"train.duration: no steps of {plan.total_steps} are left", hint="lengthen it")
    schedule = _schedule(recipe, plan, tokens, starts.schedule)
    evaluated = prepared.eval is not None or recipe.eval.tasks
    exporting = cadence(recipe.export.every, plan, tokens)
    evaluation = cadence(recipe.eval.every if evaluated else None, plan, tokens)
    if evaluated and recipe.eval.marks:
        evaluation = replace(evaluation, at_steps=mark_steps(recipe.eval.marks, plan, tokens, "eval.marks"))
    return Timetable(
        plan,
        schedule,
        evaluation,
        cadence(recipe.checkpoint.every, plan, tokens).or_of(exporting),
        mark_steps(recipe.checkpoint.marks, plan, tokens),
        exporting,
        starts.data,
        tuple(evaluation if task.every is None else cadence(task.every, plan, tokens) for task in recipe.eval.tasks),
    )


def _of_windows(recipe: Recipe, rows: PackedRows, starts: Starts) -> Timetable:
    """The timetable at the window of such rows that begins after ``starts.data`` steps.

    The plan is the window's; what is due when, and the learning rate, are those of the whole run.
    """
    from tuner.setup.window_course import full_steps, known, total_steps, window_plan  # few trainings have windows

    plan, limit = window_plan(recipe, len(rows), starts.data), total_steps(recipe)
    if limit is not None and limit <= max(starts.schedule, starts.rng):
        raise RecipeError(f"train.duration: no steps of {limit} are left", hint="lengthen it")
    course = replace(full_steps(recipe, recipe.train.duration), total_steps=limit or plan.total_steps)
    full = np.full(course.rows, int(recipe.data.max_length), dtype=np.int64)
    exporting = cadence(known(recipe.export.every, limit), course, full)
    marked = course if limit is not None else replace(course, total_steps=2**53)  # no mark is known to be too late
    evaluates = recipe.data.eval is not None or recipe.eval.tasks
    evaluation = cadence(known(recipe.eval.every, limit) if evaluates else None, course, full)
    if evaluates and recipe.eval.marks:
        evaluation = replace(evaluation, at_steps=mark_steps(recipe.eval.marks, marked, full, "eval.marks"))
    return Timetable(
        plan,
        _schedule(recipe, course, full, starts.schedule),
        evaluation,
        cadence(known(recipe.checkpoint.every, limit), course, full).or_of(exporting),
        mark_steps(recipe.checkpoint.marks, marked, full),
        exporting,
        starts.data,
        tuple(
            evaluation if task.every is None else cadence(known(task.every, limit), course, full)
            for task in recipe.eval.tasks
        ),
    )


def _schedule(recipe: Recipe, plan: Plan, row_tokens: npt.NDArray[np.int64], start: int) -> Schedule:
    """The learning rate over a run, or over the steps after ``start``, where it was reset."""
    if not start:
        return build_schedule(recipe.schedule, plan, row_tokens)
    rest = replace(plan, total_steps=max(1, plan.total_steps - start))
    return StartedLater(build_schedule(recipe.schedule, rest, row_tokens), start)
