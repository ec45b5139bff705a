"""How far a run is: its counts, its newest losses and the best one; and what share of its device it uses (MFU)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tuner.data.batches import Batch, StepBatches
from tuner.train.plan import Plan

if TYPE_CHECKING:
    from tuner.model.flops import Flops

METRICS = (
    "step", "tokens", "trained_tokens", "loss", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step", "best",
)  # fmt: skip
"""What a launch gives back about where it ended, out of a state."""
CLOCKED = ("step_s", "data_s", "tok_per_s", "trained_per_s", "mem_gib", "data_wait", "mfu")
"""What the clock and the machine say in a line of metrics.jsonl; the rest follows from the recipe."""


@dataclass(frozen=True)
class Best:
    """The lowest loss that an evaluation of a run has measured after a step, and which one."""

    metric: str
    step: int
    loss: float

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state and of `run.json`."""
        return asdict(self)


def best_after(best: Best | None, metric: str | None, step: int, line: Mapping[str, float]) -> Best | None:
    """The best once the evaluation of `step` gave `line`; the earlier of two equal ones. Step 0 was not trained."""
    if metric is None or step == 0:
        return best
    loss = line.get(metric.removeprefix("eval/"))
    if loss is None or not loss < (float("inf") if best is None else best.loss):
        return best
    return Best(metric, step, loss)


def best_of(state: Mapping[str, Any] | None, metric: str | None) -> Best | None:
    """The best that a checkpoint's JSON state tells of; None where the recipe now goes by another metric."""
    return Best(**state) if state is not None and state["metric"] == metric else None


@dataclass
class EarlyStop:
    """Ends a run whose loss falls no more, after `patience` evaluations that are not `min_delta` below the lowest.

    It follows from the losses of evaluations alone, which are the same on every rank.
    """

    patience: int
    min_delta: float
    lowest: float | None = None
    lowest_step: int = 0
    stale: int = 0
    """Evaluations since the lowest."""

    @property
    def is_due(self) -> bool:
        """Whether the run ends here."""
        return self.stale >= self.patience

    def evaluated(self, step: int, loss: float) -> None:
        """An evaluation after `step`; one that is not finite is none that is lower."""
        if self.lowest is None or loss < self.lowest - self.min_delta:
            self.lowest, self.lowest_step, self.stale = loss, step, 0
        else:
            self.stale += 1

    def reason(self) -> str:
        """Why the run ends, for the record."""
        below = f" by {self.min_delta:g}" if self.min_delta else ""
        lowest = "" if self.lowest is None else f" below the {self.lowest:.4f} of step {self.lowest_step}"
        return f"early: eval/loss did not fall{below}{lowest} in {self.stale} evaluations (eval.patience)"

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state."""
        return {"lowest": finite(self.lowest), "lowest_step": self.lowest_step, "stale": self.stale}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's JSON state."""
        self.lowest, self.lowest_step = state["lowest"], int(state["lowest_step"])
        self.stale = int(state["stale"])


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
    early: EarlyStop | None = None
    """What ends the run early, where the recipe has a patience."""

    @property
    def epoch(self) -> float:
        """Epochs finished, fractions included, since the rows began."""
        return self.plan.epoch_at(self.step - self.data_start)

    @property
    def is_last_step(self) -> bool:
        """Whether the plan's last step was taken."""
        return self.step >= self.plan.total_steps

    @property
    def is_at_end(self) -> bool:
        """Whether the run takes no further step: the plan's last one was taken, or it ends early."""
        return self.is_last_step or (self.early is not None and self.early.is_due)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: the run is at its end, and the evaluation of its last step is complete."""
        return self.is_at_end and not self.evaluation_owed

    @property
    def is_over(self) -> bool:
        """Whether this launch takes no further step: the run is at its end, or an evaluation was cut short."""
        return self.is_at_end or self.evaluation_owed

    def advance(self, batches: StepBatches) -> None:
        """One more step was taken."""
        self.step += 1
        self.tokens += batches.tokens
        self.trained_tokens += batches.trained_count

    def evaluated(self, loss: float) -> None:
        """The model was evaluated."""
        self.eval_loss, self.eval_step = loss, self.step
        self.evaluation_owed = False
        if self.early is not None:
            self.early.evaluated(self.step, loss)
        if self.first_eval_loss is None:
            self.first_eval_loss, self.first_eval_step = loss, self.step

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state."""
        early = {} if self.early is None else {"early_stop": self.early.as_state()}
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
            **early,
        }

    def restore(self, state: Mapping[str, Any], keep_best: str | None) -> None:
        """Take over a checkpoint's JSON state; its best counts where it goes by the metric ``keep_best``."""
        self.step = self.saved_step = int(state["step"])
        self.tokens, self.trained_tokens = int(state["tokens"]), int(state["trained_tokens"])
        self.eval_loss, self.first_eval_loss = state["eval_loss"], state["first_eval_loss"]
        self.eval_step, self.first_eval_step = state.get("eval_step"), state.get("first_eval_step")
        self.loss, self.evaluation_owed = state["loss"], bool(state["evaluation_owed"])
        self.best = best_of(state.get("best"), keep_best)
        if self.early is not None and "early_stop" in state:
            self.early.restore(state["early_stop"])


def finite(value: float | None) -> float | None:
    """A number that JSON has a word for; None in place of infinity and what is not a number."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class MfuMeter:
    """A model's arithmetic (:mod:`tuner.model.flops`) against this process's device."""

    flops: Flops
    peak: float
    """Operations a second in one large product, measured before the model was built, in the run's precision."""

    def mfu(self, batches: Sequence[Batch], seconds: float) -> float | None:
        """The share of the peak that forward and backward of these microbatches reach in so many seconds.

        None where the model's arithmetic is not known.
        """
        operations = self.operations(batches)
        return None if operations is None else operations / seconds / self.peak

    def operations(self, batches: Sequence[Batch]) -> float | None:
        """What forward and backward of these microbatches ask for; None where that is not known."""
        if not self.flops.complete:
            return None
        return sum(self.flops.of(batch.lengths, len(batch.trained_positions)) for batch in batches)
