"""How far a run is: its counts, its newest losses and the best one; and what share of its device it uses (MFU)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from tuner.config.methods import LoggedFigure
from tuner.config.recipe import EvalSection
from tuner.data.batches import Batch, StepBatches
from tuner.train.plan import Plan

if TYPE_CHECKING:
    from tuner.model.flops import Flops

METRICS = (
    "step", "tokens", "trained_tokens", "loss", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step", "best",
)  # fmt: skip
"""What a launch gives back about where it ended, out of a state."""
CLOCKED = (
    "step_s", "data_s", "tok_per_s", "trained_per_s", "mem_gib", "data_wait", "mfu", "attention_share", "elapsed_s",
)  # fmt: skip
"""What the clock and the machine say in a line of metrics.jsonl, or this process's rows; the rest follows from the
recipe. Others are there on a GPU alone."""


_KEPT = (
    "step", "tokens", "trained_tokens", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step", "loss",
    "evaluation_owed",
)  # fmt: skip
"""What of a run's progress a checkpoint holds as it is."""


@dataclass(frozen=True)
class Criterion:
    """A figure of evaluations by which models are compared, as `metrics.jsonl` names it, and which way is better."""

    metric: str = "eval/loss"
    better: Literal["higher", "lower"] = "lower"

    @staticmethod
    def of(metric: str | None, figures: Mapping[str, LoggedFigure]) -> Criterion | None:
        """That of a metric of `checkpoint.keep_best`, where the method has these figures."""
        if metric is None:
            return None
        figure = figures.get(metric.split("/")[1])
        return Criterion(metric, "lower" if figure is None else figure.better)

    def is_in(self, line: Mapping[str, float]) -> bool:
        """Whether an evaluation measured it: not every one scores every task."""
        return self.metric.removeprefix("eval/") in line

    def value(self, line: Mapping[str, float]) -> float | None:
        """What an evaluation measured, by its line; None where that is not finite, or nothing."""
        return finite(line.get(self.metric.removeprefix("eval/")))

    def is_better(self, value: float | None, than: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than so much; anything is better than nothing."""
        if value is None or than is None:
            return value is not None
        return value > than + by if self.better == "higher" else value < than - by


@dataclass(frozen=True)
class Best:
    """The best value of a metric that an evaluation of a run has measured after a step, and which one."""

    metric: str
    step: int
    value: float


def best_after(best: Best | None, keeps: Criterion | None, step: int, line: Mapping[str, float]) -> Best | None:
    """The best once the evaluation of `step` gave `line`; the earlier of two equal ones. Step 0 was not trained."""
    if keeps is None or step == 0:
        return best
    value = keeps.value(line)
    if value is None or not keeps.is_better(value, None if best is None else best.value):
        return best
    return Best(keeps.metric, step, value)


def best_of(state: Mapping[str, Any] | None, metric: str | None) -> Best | None:
    """The best in a checkpoint's JSON state; None where the recipe now goes by another metric."""
    return None if state is None or state["metric"] != metric else Best(**state)


@dataclass
class EarlyStop:
    """Ends a run after `patience` evaluations that are not better by more than `min_delta` than the best before them.

    It follows from the figures of evaluations alone, which are the same on every rank.
    """

    patience: int
    min_delta: float
    criterion: Criterion = Criterion()
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    """Evaluations since the best."""
    min_steps: int = 0
    """The run ends at no evaluation before this step; those before it are counted all the same."""
    latest: int = 0
    """The step of the newest evaluation."""

    @staticmethod
    def of(section: EvalSection, min_steps: int | None, keeps: Criterion | None) -> EarlyStop | None:
        """That of a recipe with a patience: by what the best is kept by, or else by the loss."""
        if section.patience is None:
            return None
        return EarlyStop(section.patience, section.min_delta, keeps or Criterion(), min_steps=min_steps or 0)

    @property
    def is_due(self) -> bool:
        """Whether the run ends here."""
        return self.stale >= self.patience and self.latest >= self.min_steps

    def evaluated(self, step: int, line: Mapping[str, float]) -> None:
        """An evaluation after `step`; a value that is not finite is none that is better.

        One that did not measure the figure does not count.
        """
        if not self.criterion.is_in(line):
            return
        self.latest = step
        value = self.criterion.value(line)
        if self.criterion.is_better(value, self.best, self.min_delta):
            self.best, self.best_step, self.stale = value, step, 0
        else:
            self.stale += 1

    def reason(self) -> str:
        """Why the run ends, for the record."""
        verb, side = ("rise", "above") if self.criterion.better == "higher" else ("fall", "below")
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        best = "" if self.best is None else f" {side} the {self.best:.4f} of step {self.best_step}"
        return f"early: {self.criterion.metric} did not {verb}{by}{best} in {self.stale} evaluations (eval.patience)"

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state."""
        counted = {"best": self.best, "best_step": self.best_step, "stale": self.stale, "latest": self.latest}
        return {"metric": self.criterion.metric, **counted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a checkpoint's JSON state, unless the recipe goes by another metric by now."""
        if state["metric"] == self.criterion.metric:
            self.best, self.best_step = state["best"], int(state["best_step"])
            self.stale, self.latest = int(state["stale"]), int(state["latest"])


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
    ends_at: int | None = None
    """The step at which the run ends, where the recipe ends it before the plan does."""
    early: EarlyStop | None = None
    """What ends the run early, where the recipe has a patience."""
    more_to_come: bool = False
    """Whether other rows may follow the plan's last step: the plan is that of one portion of several."""
    awaiting: str | None = None
    """Why this launch ends before the next portion: it is not there, or is another launch's."""
    portions: int = 1
    """Which portion of several the plan is that of, counted from 1; those that were left out do not count."""
    saves_last: bool = True
    """Whether the plan's last step is saved where other rows follow it."""

    @property
    def epoch(self) -> float:
        """Epochs finished, fractions included, since the rows began."""
        return self.plan.epoch_at(self.step - self.data_start)

    @property
    def is_last_step(self) -> bool:
        """Whether the last step was taken: the plan's, or the run's where it ends before."""
        return self.step >= self.plan.total_steps or self._is_ended

    @property
    def _is_ended(self) -> bool:
        return self.ends_at is not None and self.step >= self.ends_at

    @property
    def why_early(self) -> str | None:
        """Why a finished run has fewer steps than were planned; None where it has all."""
        if self.step >= self.plan.total_steps:
            return None
        if self._is_ended:
            return f"early: it was to end at step {self.ends_at} (train.end_at)"
        return None if self.early is None else self.early.reason()

    @property
    def is_at_end(self) -> bool:
        """Whether the run takes no further step: the plan's last one was taken, or it ends early."""
        is_done = self.step >= self.plan.total_steps and not self.more_to_come
        return is_done or self._is_ended or (self.early is not None and self.early.is_due)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: the run is at its end, and the evaluation of its last step is complete."""
        return self.is_at_end and not self.evaluation_owed

    @property
    def is_over(self) -> bool:
        """Whether this launch takes no further step: at the run's end, after a cut evaluation, or before a portion."""
        return self.is_at_end or self.evaluation_owed or self.awaiting is not None

    def advance(self, batches: StepBatches) -> None:
        """One more step was taken."""
        self.step += 1
        self.tokens += batches.tokens
        self.trained_tokens += batches.trained_count

    def evaluated(self, line: Mapping[str, float]) -> None:
        """The model was evaluated: its loss and figures as `metrics.jsonl` names them; no loss where tasks are all."""
        self.evaluation_owed = False
        if self.early is not None:
            self.early.evaluated(self.step, line)
        if "loss" not in line:
            return
        loss = line["loss"]
        self.eval_loss, self.eval_step = loss, self.step
        if self.first_eval_loss is None:
            self.first_eval_loss, self.first_eval_step = loss, self.step

    def as_state(self) -> dict[str, Any]:
        """Its part of a checkpoint's JSON state."""
        found = {name: getattr(self, name) for name in _KEPT}
        found |= {name: finite(found[name]) for name in ("eval_loss", "first_eval_loss")}
        found["best"] = None if self.best is None else asdict(self.best)
        return found if self.early is None else {**found, "early_stop": self.early.as_state()}

    def restore(self, state: Mapping[str, Any], keep_best: str | None) -> None:
        """Take over a checkpoint's JSON state; its best counts where it goes by the metric ``keep_best``."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self.saved_step = self.step
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
    peak: float | None
    """Operations a second in one large product, measured before the model was built, in the run's precision; None
    under fp8, where a step has products of several rates and no share of one means anything."""
    extra_forwards: int = 0
    """Forwards without gradients that the method takes of each micro-batch besides the one that is trained."""
    shared: int = 1
    """Processes that compute the same rows, each an equal part of their arithmetic."""

    def mfu(self, batches: Sequence[Batch], seconds: float) -> float | None:
        """The share of the peak that the arithmetic of these microbatches reaches in so many seconds.

        None where the model's arithmetic, or the peak, is not known.
        """
        operations = self.operations(batches)
        return None if operations is None or self.peak is None else operations / seconds / self.peak

    def attention_share(self, batches: Sequence[Batch]) -> float | None:
        """The share of attention in the arithmetic of these microbatches; None where that is not known."""
        if not self.flops.complete:
            return None
        parts = [self.flops.parts(batch.lengths, len(batch.trained_positions)) for batch in batches]
        return sum(part["attention"] for part in parts) / max(1.0, sum(sum(part.values()) for part in parts))

    def operations(self, batches: Sequence[Batch]) -> float | None:
        """What training on these microbatches asks of this process, forwards of a reference too.

        None where that is not known.
        """
        if not self.flops.complete:
            return None
        trained = sum(self.flops.of(batch.lengths, len(batch.trained_positions)) for batch in batches)
        forwards = sum(self.flops.forward_of(batch.lengths, len(batch.trained_positions)) for batch in batches)
        return (trained + self.extra_forwards * forwards) / self.shared
