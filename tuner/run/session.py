"""One launch of a run: its outlets, when it must stop, and what it does between steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.checkpoint.save import CheckpointDir
from tuner.checkpoint.steps import step_name
from tuner.data.prepared import Sample
from tuner.errors import DivergedError
from tuner.run.best import best_after
from tuner.run.diagnose import TakenStep, diverged
from tuner.run.hooks import Hooks
from tuner.run.meter import Meter
from tuner.run.probes import record_probes
from tuner.run.progress import Progress, finite
from tuner.run.saving import Saver, Snapshot
from tuner.run.setup import Assembly
from tuner.run.steplog import StepLog
from tuner.run.watch import Watch
from tuner.rundir.records import Records
from tuner.runtime import phase
from tuner.runtime.collective import Collective
from tuner.runtime.console import Console
from tuner.runtime.process import any_of, any_rank, gloo_group
from tuner.runtime.stop import StopSignals
from tuner.train.evaluate import EvaluationCutError, answer_samples, evaluate
from tuner.train.step import StepResult

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
    watch: Watch
    protected: tuple[Path, ...] = ()
    """Checkpoints that pruning leaves alone: the one that this launch resumed from."""

    def __post_init__(self) -> None:
        told = lambda line: self.hooks.tell("step", line["step"], line["tokens"], metrics=line)  # noqa: E731
        self.log = StepLog(self.meter, self.metrics, self.progress, self._halt, told)
        self._first_step, self._started = self.progress.step, time.monotonic()
        self._saved_at = self._started
        self._saver = Saver(self.assembly, self.checkpoints, self.meta, (self.metrics, self.samples))

    def begin(self) -> None:
        """Tell the hooks and start the clocks, once the position is known. Collective; raises what a hook raises."""
        ranks = Collective(gloo_group())
        self._saver.prepare()
        ranks.on_rank0(self._tell_start)
        best = self.progress.best
        if best is not None and not ranks.on_rank0(lambda: self._path_of(best.step).is_dir()):
            self.console.warn(f"{self._path_of(best.step)}, the best so far, is gone: the next evaluation is the best")
            self.progress.best = None
        self._first_step, self._started = self.progress.step, time.monotonic()
        self._saved_at = self._started
        self.meter.begin()

    def wishes(self) -> tuple[bool, bool]:
        """Whether any rank wants to stop, and whether any wants to save now. Collective on the CPU, not the device.

        A save beside training that has ended meanwhile is told of; its error is raised on every rank.
        """
        now = time.monotonic()
        leave = (
            self.signals.requested
            or self.stop_after(self.progress.step - self._first_step, now - self._started)
            or (self.run_dir / STOP_FILE).exists()
            or self.hooks.error is not None
        )
        due = self.assembly.timetable.saving.due_after(now - self._saved_at)
        stop, save_due, save_ended = any_of((leave, due, self._saver.ended), gloo_group())
        if save_ended:
            self.settle_save()
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
        phase.enter(f"evaluation after step {progress.step}")
        self.log.settle()
        started = time.monotonic()
        train_state, world_size = assembly.train_state, assembly.rank_info.world_size
        rows = (recipe.train.micro_batch_size, recipe.eval.max_rows, world_size)
        try:
            result = evaluate(train_state.root, train_state.step_config, held, *rows, self._heed_signals)
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
        losses = {name: finite(loss) for name, loss in result.line().items()}
        if None in losses.values():
            self.console.warn(f"step {progress.step}: an evaluation's loss is not finite")
        line = {"kind": "eval", "step": progress.step, **losses, **times}
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
        answers = answer_samples(assembly.train_state, samples, assembly.tokenizer, self._heed_signals)
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

    def save(self, finished: bool, last: bool) -> None:
        """Save the run as it is: at once if the launch ends here, ``last``, else beside the steps that follow.

        Records reach the disk before the checkpoint, so that they never lack a committed step. Collective.
        """
        phase.enter(f"save of step {self.progress.step}")
        self.log.settle()  # the wait for steps that still run is theirs
        started = time.monotonic()
        self.settle_save()
        self.metrics.flush()
        self.samples.flush()
        snapshot = self._snapshot(finished)
        if last or not self._saver.start(snapshot):
            self._saved(self._saver.save(snapshot))
        self._saved_at = time.monotonic()
        self.meter.leave_out(self._saved_at - started)

    def settle_save(self) -> None:
        """Wait for a save beside training, if there is one, and tell of it. Raises what any rank raised in it."""
        snapshot = self._saver.finish()
        if snapshot is not None:
            self._saved(snapshot)

    def _snapshot(self, finished: bool) -> Snapshot:
        assembly, progress = self.assembly, self.progress
        train_state, table = assembly.train_state, assembly.timetable
        kept = {*table.marks, *([] if progress.best is None else [progress.best.step])}
        is_last = progress.step >= table.plan.total_steps  # perhaps with an evaluation owed, so not finished yet
        is_probed = is_last or self.is_kept() or table.exporting.due_at(progress.step)
        return Snapshot(
            progress.step,
            progress.tokens,
            progress.as_state(finished) | {"guard": train_state.guard.as_state()},
            record_probes(train_state.root, assembly.probes, train_state.step_config.device) if is_probed else None,
            (*self.protected, *map(self._path_of, kept)),
            progress.best is not None and progress.best.step == progress.step,
        )

    def _saved(self, snapshot: Snapshot) -> None:
        path = self._path_of(snapshot.step)
        self.progress.saved_step = snapshot.step
        self.console.say("saved", f"{path}{' (best so far)' if snapshot.is_best else ''}")
        self.hooks.tell("save", snapshot.step, snapshot.tokens, path=path)

    def refresh(self) -> None:
        """Print the newest step and write the lines so far, where the console is due."""
        if self.meter.refresh_due():
            self.meter.show(self.console)
            self.metrics.flush()

    def end(self) -> None:
        """Print and write what is left."""
        self.log.settle()
        self.meter.show(self.console)
        self.metrics.flush()
        self.metrics.sync()

    def close(self) -> None:
        """Leave no save half done behind an error; one that fails, too, is told of in a warning."""
        try:
            self.settle_save()
        except Exception as error:  # noqa: BLE001 - another error is being raised
            self.console.warn(f"a save failed, too: {error}")

    def _path_of(self, step: int) -> Path:
        return self.checkpoints.path / step_name(step)

    def _tell_start(self) -> None:
        self.hooks.tell("start", self.progress.step, self.progress.tokens)
        self.hooks.raise_error()

    def _halt(self, taken: TakenStep, result: StepResult) -> DivergedError:
        self.close()
        saved = self.progress.saved_step
        last = None if saved is None else str(self._path_of(saved))
        return diverged(self.assembly.train_state, taken, result, last)


def _one_line(text: str) -> str:
    """A text in one line, cut where it is long; one of white space alone in quotes, with escapes."""
    shown = text.strip().replace("\n", " ") or repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"
