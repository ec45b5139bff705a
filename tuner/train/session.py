"""One launch of a run: its outlets, when it must stop, and what it does between steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.checkpoint.agree import Ranks
from tuner.checkpoint.prune import prune
from tuner.checkpoint.save import CheckpointDir, save
from tuner.checkpoint.steps import step_name
from tuner.data.prepared import Sample
from tuner.errors import DivergedError
from tuner.runtime.console import Console
from tuner.runtime.process import any_of, any_rank, gloo_group
from tuner.runtime.stop import StopSignals
from tuner.train.best import best_after
from tuner.train.diagnose import TakenStep, diverged
from tuner.train.evaluate import EvaluationCutError, answer_samples, evaluate
from tuner.train.hooks import Hooks
from tuner.train.meter import Meter
from tuner.train.probes import record_probes
from tuner.train.progress import Progress, run_tensors
from tuner.train.records import Records
from tuner.train.setup import Assembly
from tuner.train.step import StepResult
from tuner.train.steplog import StepLog

SHOWN_CHARACTERS = 140
STOP_FILE = "STOP"
"""A file of this name in the run directory asks the run to save and stop; it is removed when that is done."""


@dataclass
class Session:
    """What one launch writes to and listens to, around an assembly."""

    assembly: Assembly
    progress: Progress
    run_dir: Path
    checkpoints: CheckpointDir
    meta: dict[str, Any]
    metrics: Records
    samples: Records
    console: Console
    meter: Meter
    hooks: Hooks
    signals: StopSignals
    stop_after: Callable[[int, float], bool]
    """Whether this launch is over, given its steps and seconds so far."""
    protected: tuple[Path, ...] = ()
    """Checkpoints that pruning leaves alone: the one that this launch resumed from."""

    def __post_init__(self) -> None:
        told = lambda line: self.hooks.tell("step", line["step"], line["tokens"], metrics=line)  # noqa: E731
        self.log = StepLog(self.meter, self.metrics, self.progress, self._halt, told)
        self._first_step, self._started = self.progress.step, time.monotonic()
        self._saved_at = self._started

    def begin(self) -> None:
        """Tell the hooks and start the clocks, once the position is known. Collective; raises what a hook raises."""
        ranks = Ranks(gloo_group())
        ranks.on_main(self._tell_start)
        best = self.progress.best
        if best is not None and not ranks.on_main(lambda: self._path_of(best.step).is_dir()):
            self.console.warn(f"{self._path_of(best.step)}, the best so far, is gone: the next evaluation is the best")
            self.progress.best = None
        self._first_step, self._started = self.progress.step, time.monotonic()
        self._saved_at = self._started
        self.meter.begin()

    def wishes(self) -> tuple[bool, bool]:
        """Whether any rank wants to stop, and whether any wants to save now. Collective on the CPU, not the device."""
        now = time.monotonic()
        leave = (
            self.signals.requested
            or self.stop_after(self.progress.step - self._first_step, now - self._started)
            or (self.run_dir / STOP_FILE).exists()
            or self.hooks.error is not None
        )
        due = self.assembly.timetable.saving.due_after(now - self._saved_at)
        stop, save_due = any_of((leave, due), gloo_group())
        return stop, save_due

    def evaluate(self) -> None:
        """Loss and sample answers on the held-out rows, where there are any. Collective.

        A stop signal cuts it short: nothing is written then, and the evaluation is owed.
        """
        assembly, progress = self.assembly, self.progress
        held, recipe = assembly.held_out, assembly.resolved.recipe
        progress.evaluation_owed = held is not None
        if held is None:
            return
        self.log.settle()
        started = time.monotonic()
        learner, world_size = assembly.learner, assembly.launch.world_size
        rows = (recipe.train.micro_batch_size, recipe.eval.max_rows, world_size)
        try:
            result = evaluate(learner.root, learner.numerics, held, *rows, self._heed_signals)
            measured = time.monotonic()
            answers = self._answer_samples()
        except EvaluationCutError:
            self.console.say("eval", f"step {progress.step}: cut short, done again when the run goes on")
            return
        progress.evaluated(result.loss)
        progress.best = best_after(progress.best, recipe.checkpoint.keep_best, progress.step, result.line())
        self._show_samples(answers)
        seconds, samples_s = time.monotonic() - started, time.monotonic() - measured
        times = {"eval_s": round(seconds, 3), "samples_s": round(samples_s, 3)}
        line = {"kind": "eval", "step": progress.step, **result.line(), **times}
        self.metrics.add(line)
        self.hooks.tell("evaluation", progress.step, progress.tokens, metrics=line)
        self.samples.flush()
        self.meter.evaluated(self.console, progress.step, result.line(), seconds)

    def _heed_signals(self) -> None:
        """Called between the forwards of an evaluation. Collective."""
        if any_rank(self.signals.requested, gloo_group()):
            raise EvaluationCutError

    def _answer_samples(self) -> list[tuple[Sample, str]]:
        assembly = self.assembly
        samples = assembly.prepared.samples[: assembly.resolved.recipe.eval.samples]
        answers = answer_samples(assembly.learner, samples, assembly.tokenizer, self._heed_signals)
        return list(zip(samples, answers, strict=True))

    def _show_samples(self, answers: list[tuple[Sample, str]]) -> None:
        for sample, answer in answers:
            said = {"prompt": sample.prompt_text, "answer": answer, "reference": sample.reference}
            self.samples.add({"step": self.progress.step, **said})
            self.console.say("sample", f"wanted {_one_line(sample.reference)}\ngot    {_one_line(answer)}")

    def is_kept(self) -> bool:
        """Whether the step just taken is one of which pruning leaves the checkpoint alone."""
        step, best = self.progress.step, self.progress.best
        return step in self.assembly.timetable.marks or (best is not None and best.step == step)

    def save(self, finished: bool) -> None:
        """Commit the state of the run; records reach the disk first, so that they never lack a committed step."""
        assembly, progress = self.assembly, self.progress
        learner = assembly.learner
        self.log.settle()  # the wait for steps that still run is theirs
        started = time.monotonic()
        self.metrics.flush(durable=True)
        self.samples.flush(durable=True)
        state = progress.as_state(finished) | {"guard": learner.guard.as_state()}
        probe = record_probes(learner.root, assembly.probes, learner.numerics.device)
        path = save(self.checkpoints, progress.step, run_tensors(assembly), state, self.meta, probe)
        progress.saved_step = progress.step
        keep = assembly.resolved.recipe.checkpoint.keep
        kept = {*assembly.timetable.marks, *([] if progress.best is None else [progress.best.step])}
        protected = (*self.protected, *map(self._path_of, kept))
        Ranks(gloo_group()).on_main(lambda: len(prune(self.checkpoints.path, keep, protected)))
        self._saved_at = time.monotonic()
        self.meter.leave_out(self._saved_at - started)
        is_best = progress.best is not None and progress.best.step == progress.step
        self.console.say("saved", f"{path}{' (best so far)' if is_best else ''}")
        self.hooks.tell("save", progress.step, progress.tokens, path=path)

    def refresh(self) -> None:
        """Print the newest step and write the lines so far, where the console is due."""
        if self.meter.refresh_due():
            self.meter.show(self.console)
            self.metrics.flush()

    def end(self) -> None:
        """Print and write what is left."""
        self.log.settle()
        self.meter.show(self.console)
        self.metrics.flush(durable=True)

    def _path_of(self, step: int) -> Path:
        return self.checkpoints.path / step_name(step)

    def _tell_start(self) -> None:
        self.hooks.tell("start", self.progress.step, self.progress.tokens)
        self.hooks.raise_error()

    def _halt(self, taken: TakenStep, result: StepResult) -> DivergedError:
        saved = self.progress.saved_step
        last = None if saved is None else str(self._path_of(saved))
        return diverged(self.assembly.learner, taken, result, last)


def _one_line(text: str) -> str:
    """A text in one line, cut where it is long; one of white space alone in quotes, with escapes."""
    shown = text.strip().replace("\n", " ") or repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"
