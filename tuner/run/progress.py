"""Where a run is: what a resume must know besides tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.data.batches import StepBatches
from tuner.run.best import Best, best_of
from tuner.run.resets import Reset, resets_of, starts_of, updates_of
from tuner.run.setup import Assembly

MODEL = "model/"
"""Names of a checkpoint's tensors that are weights begin so."""
METRICS = (
    "step", "tokens", "trained_tokens", "loss", "eval_loss", "eval_step", "first_eval_loss", "first_eval_step", "best",
)  # fmt: skip
"""What a launch gives back about where it ended, out of a state."""


@dataclass
class Progress:
    """Counts of a run so far, and its newest losses."""

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
    """Whether the evaluation of this step was cut short, so that the run goes on with it."""
    best: Best | None = None
    """The best evaluation so far, where the recipe keeps the best."""
    resets: tuple[Reset, ...] = ()
    """What of the run began anew, and where."""

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

    def as_state(self, finished: bool) -> dict[str, Any]:
        """The JSON state of a checkpoint."""
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
            "resets": [reset.as_state() for reset in self.resets],
            "finished": finished,
        }


def finite(value: float | None) -> float | None:
    """A number that JSON has a word for; None in place of infinity and what is not a number."""
    return value if value is not None and math.isfinite(value) else None


def outcome(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says of a whole run by its last state: the best evaluation and, once it is finished, metrics."""
    told = {"metrics": {key: state[key] for key in METRICS}} if state["finished"] else {}
    return {"best": state["best"]} | told


def run_tensors(assembly: Assembly) -> dict[str, Any]:
    """The tensors of a checkpoint by name: trained parameters and the optimizer's state."""
    train_state = assembly.train_state
    model = {f"{MODEL}{name}": parameter.data for name, parameter in train_state.parameters.items()}
    return model | train_state.optimizer.state_tensors()


def make_room(assembly: Assembly, state: Mapping[str, Any]) -> None:
    """Allocate what a checkpoint with this JSON state holds: the optimizer's state, once there was an update of it."""
    if updates_of(state) > starts_of(resets_of(state)).updates:
        assembly.train_state.optimizer.allocate()


def restore_position(assembly: Assembly, progress: Progress, state: Mapping[str, Any]) -> None:
    """Take over a checkpoint's JSON state once its tensors are loaded."""
    progress.step = progress.saved_step = int(state["step"])
    progress.tokens, progress.trained_tokens = int(state["tokens"]), int(state["trained_tokens"])
    progress.eval_loss, progress.first_eval_loss = state["eval_loss"], state["first_eval_loss"]
    progress.eval_step, progress.first_eval_step = state.get("eval_step"), state.get("first_eval_step")
    progress.loss, progress.evaluation_owed = state["loss"], bool(state["evaluation_owed"])
    progress.best = best_of(state.get("best"), assembly.resolved.recipe.checkpoint.keep_best)
    assembly.train_state.guard.restore(state["guard"])
    assembly.train_state.optimizer.set_step_count(updates_of(state) - starts_of(progress.resets).updates)
