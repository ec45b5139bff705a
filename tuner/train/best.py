"""Checkpoints that pruning leaves alone: marked steps, and the best one by an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.duration import Duration
from tuner.errors import RecipeError
from tuner.train.evaluate import HeldOut
from tuner.train.plan import Plan, steps_of

PREFIX = "eval/"


@dataclass(frozen=True)
class Best:
    """The lowest loss that an evaluation of a run has measured after a step, and which one."""

    metric: str
    step: int
    loss: float

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state and of `run.json`."""
        return {"metric": self.metric, "step": self.step, "loss": self.loss}


def best_after(best: Best | None, metric: str | None, step: int, line: Mapping[str, float]) -> Best | None:
    """The best once the evaluation of `step` gave `line`; the earlier of two equal ones. Step 0 was not trained."""
    if metric is None or step == 0:
        return best
    loss = line.get(metric.removeprefix(PREFIX))
    if loss is None or not loss < (float("inf") if best is None else best.loss):
        return best
    return Best(metric, step, loss)


def best_of(state: Mapping[str, Any] | None, metric: str | None) -> Best | None:
    """The best that a checkpoint's JSON state tells of; None where the recipe now goes by another metric."""
    return Best(**state) if state is not None and state["metric"] == metric else None


def check_metric(metric: str | None, held: HeldOut | None) -> None:
    """Raise RecipeError, naming what there is, for a loss that evaluations of these held-out rows do not measure."""
    if metric is None or held is None:
        return
    names = [f"{PREFIX}loss"]
    names += [f"{PREFIX}loss/{name}" for name in held.sources] if len(held.sources) > 1 else []
    if metric not in names:
        raise RecipeError(f"checkpoint.keep_best: no evaluation measures {metric}", hint=f"write {' or '.join(names)}")


def mark_steps(marks: Sequence[Duration], plan: Plan, row_tokens: npt.NDArray[np.int64]) -> frozenset[int]:
    """The steps of `checkpoint.marks`. Raises RecipeError for one that lies behind the run's end."""
    steps = frozenset(steps_of(mark, plan, row_tokens) for mark in marks)
    if steps and max(steps) > plan.total_steps:
        late = next(mark for mark in marks if steps_of(mark, plan, row_tokens) > plan.total_steps)
        raise RecipeError(
            f"checkpoint.marks: {late} is step {max(steps):,}, the run ends at {plan.total_steps:,}",
            hint="remove it, or lengthen train.duration",
        )
    return steps
