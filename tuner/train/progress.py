"""How far a run is: its counts, and its newest losses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.data.batches import StepBatches
from tuner.train.best import Best, best_of
from tuner.train.plan import Plan

METRICS = (
    "step", "tokens", "trained_tokens", "loss", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step", "best",
)  # fmt: skip
"""What a launch gives back about where it ended, out of a state."""


@dataclass
class Progress:
    """Counts of a run so far, and its newest losses."""

    plan: Plan
    data_start: int = 0
    """The step after which the rows began again from the first."""
    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    eval_loss: float | None = None
    eval_step: int | None = None
    first_eval_loss: float | None = None
    first_eval_step: int | None = None
    loss: float | None = None
    saved_step: int | None = None
    evaluation_owed: bool = False
    """Whether the evaluation of this step was cut short, so that the run resumes with it."""
    best: Best | None = None
    """The best evaluation so far, where the recipe keeps the best."""

    @property
    def epoch(self) -> float:
        """Epochs finished, fractions included, since the rows began."""
        return self.plan.epoch_at(self.step - self.data_start)

    @property
    def is_last_step(self) -> bool:
        """Whether the plan's last step was taken."""
        return self.step >= self.plan.total_steps

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: every step was taken, and the evaluation of the last one is complete."""
        return self.is_last_step and not self.evaluation_owed

    @property
    def is_over(self) -> bool:
        """Whether this launch takes no further step: the plan ends here, or an evaluation was cut short."""
        return self.is_last_step or self.evaluation_owed

    def advance(self, batches: StepBatches) -> None:
        """One more step was taken."""
        self.step += 1
        self.tokens += batches.tokens
        self.trained_tokens += batches.trained_count

    def evaluated(self, loss: float) -> None:
        """The model was evaluated."""
        self.eval_loss, self.eval_step = loss, self.step
        self.evaluation_owed = False
        if self.first_eval_loss is None:
            self.first_eval_loss, self.first_eval_step = loss, self.step

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "eval_loss": finite(self.eval_loss),
            "eval_step": self.eval_step,
            "first_eval_loss": finite(self.first_eval_loss),
            "first_eval_step": self.first_eval_step,
            "loss": self.loss,
            "evaluation_owed": self.evaluation_owed,
            "best": None if self.best is None else self.best.as_state(),
        }

    def restore(self, state: Mapping[str, Any], keep_best: str | None) -> None:
        """Take over a checkpoint's JSON state; its best counts where it goes by the metric ``keep_best``."""
        self.step = self.saved_step = int(state["step"])
        self.tokens, self.trained_tokens = int(state["tokens"]), int(state["trained_tokens"])
        self.eval_loss, self.first_eval_loss = state["eval_loss"], state["first_eval_loss"]
        self.eval_step, self.first_eval_step = state.get("eval_step"), state.get("first_eval_step")
        self.loss, self.evaluation_owed = state["loss"], bool(state["evaluation_owed"])
        self.best = best_of(state.get("best"), keep_best)


def finite(value: float | None) -> float | None:
    """A number that JSON has a word for; None in place of infinity and what is not a number."""
    return value if value is not None and math.isfinite(value) else None
