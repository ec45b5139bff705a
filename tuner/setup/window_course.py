"""The course of a run whose data comes in windows: the plan of one of them, and what is due when over all of them.

The rows of later windows are not known, so the tokens of a duration are counted in full rows. Where `train.duration` is
in epochs, each window is trained so often and the length of the run is not known: its schedule needs none then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tuner.config.duration import Duration
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.setup.probes import probes_of
from tuner.train.plan import Plan, plan_steps

if TYPE_CHECKING:
    import torch

    from tuner.data.prepared import PackedRows
    from tuner.setup.resolve import Resolved


@dataclass(frozen=True)
class Course:
    """That of a resolved run."""

    resolved: Resolved

    @property
    def limit(self) -> int | None:
        """The steps after which the run ends whatever windows are left; None where its windows decide."""
        return total_steps(self.resolved.recipe)

    def plan(self, rows: int, first_step: int) -> Plan:
        """That of a window of so many rows which begins after ``first_step`` steps."""
        return window_plan(self.resolved.recipe, rows, first_step)

    def probes(self, rows: PackedRows) -> list[torch.Tensor]:
        """The beginnings of its rows whose logits checkpoints record."""
        return probes_of(self.resolved.recipe, rows)

    def check(self) -> None:
        """Raise RecipeError where the model at the start would be asked about windows that come later."""
        check_reference(self.resolved.recipe)

    def words(self, plan: Plan, first_step: int) -> str:
        """The plan of a window that begins after ``first_step`` steps, for people."""
        return window_words(self.resolved.recipe, plan, first_step)


def total_steps(recipe: Recipe) -> int | None:
    """The steps after which the run ends whatever windows are left; None where its windows decide."""
    duration = recipe.train.duration
    return None if duration.unit == "epochs" else full_steps(recipe, duration).total_steps


def window_plan(recipe: Recipe, rows: int, first_step: int) -> Plan:
    """The plan of a window of so many rows that begins after ``first_step`` steps; its steps count from the run's."""
    batch, duration = recipe.train.global_batch_size, recipe.train.duration
    per_epoch = math.ceil(rows / batch)
    steps = math.ceil(duration.count * per_epoch) if duration.unit == "epochs" else per_epoch
    limit = total_steps(recipe)
    last = first_step + steps if limit is None else min(first_step + steps, limit)
    return Plan(rows, batch, per_epoch, last)


def check_reference(recipe: Recipe) -> None:
    """Raise RecipeError where a resolved recipe asks the model at the start about windows that come later."""
    if getattr(recipe.method, "reference", None) == "columns":
        raise RecipeError(
            "data.windows: the reference's columns are computed before the first step, for all data",
            hint="train an adapter, with method.reference: adapter_off, or remove data.windows",
        )


def window_words(recipe: Recipe, plan: Plan, first_step: int) -> str:
    """The plan of a window that begins after ``first_step`` steps, for people."""
    limit = total_steps(recipe)
    rows = f"{plan.rows:,} row{'s' if plan.rows != 1 else ''} / {plan.global_batch_size}"
    steps = f"steps {first_step + 1:,} to {plan.total_steps:,}"
    return f"{rows} = {steps}" + ("" if limit is None else f" of at most {limit:,}")


def full_steps(recipe: Recipe, duration: Duration) -> Plan:
    """The plan of a run whose rows are all full."""
    batch = recipe.train.global_batch_size
    return plan_steps(duration, np.full(batch, int(recipe.data.max_length), dtype=np.int64), batch)


def known(every: Sequence[Duration] | None, limit: int | None) -> Sequence[Duration] | None:
    """A cadence without the shares of a run whose length is not known: those of a default, as others are refused."""
    if every is None or limit is not None:
        return every
    return [duration for duration in every if duration.unit != "%"] or None
