"""The training loop: one function on one screen; what it calls is already built."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.checkpoint.agree import Ranks
from tuner.checkpoint.prune import prune
from tuner.checkpoint.save import CheckpointDir, save
from tuner.runtime.console import Console
from tuner.runtime.process import gloo_group
from tuner.runtime.stop import StopSignals
from tuner.train.evaluate import answer_samples, evaluate
from tuner.train.meter import Meter
from tuner.train.probes import record_probes
from tuner.train.records import Records
from tuner.train.setup import Assembly
from tuner.train.step import optimizer_step

MAX_ANSWER_TOKENS = 128
SHOWN_CHARACTERS = 140


@dataclass
class Progress:
    """Where the run is: what a resume must know besides tensors."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    eval_loss: float | None = None
    first_eval_loss: float | None = None
    loss: float | None = None
    saved_step: int | None = None

    def as_state(self, finished: bool) -> dict[str, Any]:
        """The JSON state of a checkpoint."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "eval_loss": self.eval_loss,
            "first_eval_loss": self.first_eval_loss,
            "loss": self.loss,
            "finished": finished,
        }


@dataclass
class Session:
    """One launch of a run: its outlets, and when it must stop."""

    assembly: Assembly
    progress: Progress
    checkpoints: CheckpointDir
    meta: dict[str, Any]
    metrics: Records
    samples: Records
    console: Console
    meter: Meter
    stop_after: Callable[[int, float], bool]
    """Whether this launch is over, given its steps and seconds so far."""
    protected: tuple[Path, ...] = ()
    """Checkpoints that pruning leaves alone: the one that this launch resumed from."""


def train_loop(session: Session, signals: StopSignals) -> bool:
    """Train to the end of the plan; true when finished, false when stopped with a checkpoint saved."""
    assembly, progress, meter = session.assembly, session.progress, session.meter
    table, total = assembly.timetable, assembly.timetable.plan.total_steps
    settings = assembly.resolved.recipe
    if progress.step == 0 and settings.eval.at_start:
        _evaluate(session)
    first, started = progress.step, time.monotonic()
    saved_at, stop = started, False
    while progress.step < total and not stop:
        batches = meter.timed("data", lambda: assembly.batches.step(progress.step))
        now = time.monotonic()
        leave = signals.requested or session.stop_after(progress.step + 1 - first, now - started)
        wishes = (leave, table.saving.due_after(now - saved_at))
        factor = table.schedule.factor(progress.step + 1)
        result = optimizer_step(assembly.learner, progress.step, batches, factor, wishes)
        lr = assembly.learner.optimizer.peak_lr * factor
        progress.step += 1
        progress.loss = result.loss
        progress.tokens += batches.tokens
        progress.trained_tokens += batches.trained_count
        session.metrics.add(meter.step_line(progress.step, table.plan, progress.tokens, batches.tokens, result, lr))
        stop, save_due = result.wishes
        if table.evaluation.due_at(progress.step) or (progress.step == total and settings.eval.at_end):
            _evaluate(session)
        if (save_due or stop or table.saving.due_at(progress.step)) and progress.step < total:
            _save(session, finished=False)
            saved_at = time.monotonic()
        if meter.refresh_due(progress.step, total):
            meter.show(session.console)
            session.metrics.flush()
    finished = progress.step >= total
    if finished and settings.checkpoint.at_end:
        _save(session, finished=True)
    session.metrics.flush(durable=True)
    return finished


def _evaluate(session: Session) -> None:
    assembly, progress = session.assembly, session.progress
    rows, recipe = assembly.prepared.eval, assembly.resolved.recipe
    if rows is None:
        return
    started = time.monotonic()
    loss = evaluate(
        assembly.learner, rows, recipe.train.micro_batch_size, recipe.eval.max_rows, assembly.launch.world_size
    )
    progress.eval_loss = loss
    if progress.first_eval_loss is None:
        progress.first_eval_loss = loss
    samples = assembly.prepared.samples[: recipe.eval.samples]
    answers = answer_samples(assembly.learner, samples, list(assembly.tokenizer.eos_ids), MAX_ANSWER_TOKENS)
    for sample, ids in zip(samples, answers, strict=True):
        answer = assembly.tokenizer.decode(ids)
        session.samples.add(
            {"step": progress.step, "prompt": sample.prompt_text, "answer": answer, "reference": sample.reference}
        )
        session.console.say("sample", f"wanted {_one_line(sample.reference)}\ngot    {_one_line(answer)}")
    seconds = time.monotonic() - started
    session.metrics.add({"kind": "eval", "step": progress.step, "loss": loss, "eval_s": round(seconds, 3)})
    session.samples.flush()
    session.meter.evaluated(session.console, progress.step, loss, seconds)


def _one_line(text: str) -> str:
    shown = text.strip().replace("\n", " ")
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"


def _save(session: Session, finished: bool) -> None:
    """Commit the state of the run; records reach the disk first, so that they never lack a committed step."""
    assembly, progress = session.assembly, session.progress
    learner, started = assembly.learner, time.monotonic()
    session.metrics.flush(durable=True)
    session.samples.flush(durable=True)
    probe = record_probes(learner.root, assembly.probes, learner.numerics.device)
    path = save(
        session.checkpoints,
        progress.step,
        run_tensors(assembly),
        progress.as_state(finished),
        session.meta,
        probe,
    )
    progress.saved_step = progress.step
    keep = assembly.resolved.recipe.checkpoint.keep
    Ranks(gloo_group()).on_main(lambda: len(prune(session.checkpoints.path, keep, session.protected)))
    session.meter.leave_out(time.monotonic() - started)
    session.console.say("saved", str(path))


def run_tensors(assembly: Assembly) -> dict[str, Any]:
    """The tensors of a checkpoint by name: trained parameters and the optimizer's moments."""
    learner = assembly.learner
    model = {f"model/{name}": parameter.data for name, parameter in learner.parameters.items()}
    return model | learner.optimizer.state_tensors()


def restore_position(assembly: Assembly, progress: Progress, state: dict[str, Any]) -> None:
    """Take over a checkpoint's JSON state once its tensors are loaded."""
    progress.step = progress.saved_step = int(state["step"])
    progress.tokens, progress.trained_tokens = int(state["tokens"]), int(state["trained_tokens"])
    progress.eval_loss, progress.first_eval_loss = state["eval_loss"], state["first_eval_loss"]
    progress.loss = state["loss"]
    assembly.learner.optimizer.set_step_count(progress.step)
