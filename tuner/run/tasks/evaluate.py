"""The task that measures the loss on held-out rows and shows sample answers."""

import time
from collections.abc import Iterator

from tuner.data.prepared import Sample
from tuner.run.state import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.rundir.records import Records
from tuner.runtime import phase
from tuner.runtime.process import any_rank, gloo_group
from tuner.train.evaluate import EvaluationCutError, answer_samples, evaluate
from tuner.train.progress import best_after, finite
from tuner.train.tasks import Event, Request, Task

SHOWN_CHARACTERS = 140


class EvaluateTask(Task):
    """Evaluates when it is due, where there are held-out rows; a stop signal cuts it short, and it is owed then."""

    def __init__(self, context: LaunchContext, log: LogTask, samples: Records) -> None:
        self._assembly, self._progress = context.assembly, context.progress
        self._console, self._signals = context.console, context.signals
        self._log, self._samples = log, samples
        self._settings = self._assembly.resolved.recipe.eval

    def start(self) -> Iterator[Event]:
        """Evaluate where that is owed, or before the first step of a run."""
        if self._progress.evaluation_owed or (self._progress.step == 0 and self._settings.at_start):
            yield from self._evaluate()

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Evaluate where it is due."""
        is_due = self._assembly.timetable.evaluation.due_at(self._progress.step)
        if is_due or (self._progress.is_last_step and self._settings.at_end):
            yield from self._evaluate()

    def _evaluate(self) -> Iterator[Event]:
        assembly, progress, held = self._assembly, self._progress, self._assembly.held_out
        progress.evaluation_owed = held is not None
        if held is None:
            return
        phase.enter(f"evaluation after step {progress.step}")
        yield from self._log.settle()
        started = time.monotonic()
        state, recipe = assembly.train_state, assembly.resolved.recipe
        try:
            result = evaluate(
                state.root,
                state.step_config,
                held,
                recipe.train.micro_batch_size,
                self._settings.max_rows,
                self._heed_signals,
            )
            measured = time.monotonic()
            answers = self._answer_samples()
        except EvaluationCutError:
            self._console.say("eval", f"step {progress.step}: cut short, done again when the run is resumed")
            return
        progress.evaluated(result.loss)
        progress.best = best_after(progress.best, recipe.checkpoint.keep_best, progress.step, result.line())
        self._show_samples(answers)
        seconds, samples_s = time.monotonic() - started, time.monotonic() - measured
        losses = {name: finite(loss) for name, loss in result.line().items()}
        if None in losses.values():
            self._console.warn(f"step {progress.step}: an evaluation's loss is not finite")
        times = {"eval_s": round(seconds, 3), "samples_s": round(samples_s, 3)}
        line = {"kind": "eval", "step": progress.step, **losses, **times}
        self._log.metrics.add(line)
        self._samples.flush()
        self._log.clock.leave_out(seconds)
        yield Event("evaluation", progress.step, progress.tokens, line)

    def _heed_signals(self) -> None:
        """Called between the forwards of an evaluation. Collective."""
        if any_rank(self._signals.requested, gloo_group()):
            raise EvaluationCutError

    def _answer_samples(self) -> list[tuple[Sample, str]]:
        assembly = self._assembly
        samples = assembly.prepared.samples[: self._settings.samples]
        answers = answer_samples(assembly.train_state, samples, assembly.tokenizer, self._heed_signals)
        return list(zip(samples, answers, strict=True))

    def _show_samples(self, answers: list[tuple[Sample, str]]) -> None:
        for sample, answer in answers:
            said = {"prompt": sample.prompt_text, "answer": answer, "reference": sample.reference}
            self._samples.add({"step": self._progress.step, **said})
            self._console.say("sample", f"wanted {_one_line(sample.reference)}\ngot    {_one_line(answer)}")


def _one_line(text: str) -> str:
    """A text in one line, cut where it is long; one of white space alone in quotes, with escapes."""
    shown = text.strip().replace("\n", " ") or repr(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + "…"
