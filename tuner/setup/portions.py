"""How long a run is, and the plan of one portion where its data come in portions.

The rows of later portions are not known, so the tokens of a duration are counted in full rows. Where `train.duration`
is in epochs, each portion is trained so often and the length of the run is not known: its schedule needs none then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tuner.errors import RecipeError
from tuner.train.plan import Plan, batch_sizes, plan_steps

if TYPE_CHECKING:
    from tuner.data.prepared import PackedRows
    from tuner.setup.resolve import Resolved


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
        limit = self.limit
        rows = f"{plan.rows:,} row{'s' if plan.rows != 1 else ''} / {plan.global_batch_size}"
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
        sizes = batch_sizes(recipe.train, rows.tokens_per_row)
        plan = plan_steps(recipe.train.duration, rows.tokens_per_row, recipe.train.global_batch_size, sizes)
        return Extent(plan, plan, rows.tokens_per_row, plan.total_steps)
    plans = PortionPlans(resolved)
    plan, limit = plans.plan(len(rows), first_step), plans.limit
    whole = replace(plans.full, total_steps=limit or plan.total_steps)
    return Extent(plan, whole, np.full(whole.rows, int(recipe.data.max_length), dtype=np.int64), limit)
