"""The task that measures the loss and figures on held-out rows, scores tasks, and shows sample answers."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from tuner.config.recipe import EvalSection
from tuner.data.prepared import PreparedSample
from tuner.errors import counted
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.rundir.layout import SAMPLES
from tuner.rundir.records import Records
from tuner.runtime import phase, startup
from tuner.runtime.console import LABEL_WIDTH, Updates, one_line
from tuner.runtime.device import room_on
from tuner.runtime.files import gib
from tuner.runtime.process import any_rank, gloo_group
from tuner.train.evaluate import ByTerms, Evaluation, EvaluationCutError, HeldOut, answer_samples, evaluate
from tuner.train.progress import best_after, finite
from tuner.train.tasks import Event, Request, Task

if TYPE_CHECKING:  # which a launch without tasks does not load
    from tuner.evals.task import ScoredTask, TaskScore
    from tuner.run.tasks.task_scores import TaskScores

ROOM_FOR_SAMPLES = 1.2
"""Bytes that are to be free for each byte of the model: a unit lies there twice while it is gathered."""


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation measured: the held-out rows, where there are any, answers to prompts, and scores of tasks."""

    rows: Evaluation | None
    answers: list[tuple[PreparedSample, str]]
    scores: list["TaskScore"]
    averaged: dict[str, float]
    """The rows' figures of the averaged weights, by names that begin with ``ema/``."""
    samples_s: float = 0.0
    tasks_s: float = 0.0

    def line(self) -> dict[str, float]:
        """Its figures of the trained weights, as `metrics.jsonl` names them."""
        own = {} if self.rows is None else self.rows.line()
        return own | {name: value for score in self.scores for name, value in score.line().items()}

    def times(self) -> dict[str, float]:
        """The seconds of its parts."""
        samples = {} if self.rows is None else {"samples_s": round(self.samples_s, 3)}
        return samples | ({"tasks_s": round(self.tasks_s, 3)} if self.scores else {})


class EvaluateTask(Task):
    """Evaluates when it is due, where there are held-out rows or tasks; a stop signal cuts it short, and it is owed."""

    def __init__(
        self, context: LaunchContext, section: EvalSection, log: LogTask, samples: Records,
        tasks: "TaskScores | None" = None,
    ) -> None:
        self._assembly, self._progress = context.assembly, context.progress
        self._console, self._signals = context.console, context.signals
        self._log, self._samples, self._tasks = log, samples, tasks
        self._settings = section
        self._directory = context.run.path
        self._has_warned = False

    def start(self) -> Iterator[Event]:
        """Evaluate where that is owed, or before the first step of a run."""
        if self._tasks is not None:
            self._tasks.drop_after(self._progress.step)
        is_new = self._progress.step == 0 and self._progress.saved_step is None  # a save before the first step has it
        if self._progress.evaluation_owed or (is_new and self._settings.at_start):
            with startup.phase("evaluation"):
                yield from self._evaluate(self._assembly.held_out, self._every_task())

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Evaluate where it is due."""
        step, held = self._progress.step, self._assembly.held_out
        if Request.EVALUATE in agreed or (self._progress.is_last_step and self._settings.at_end):
            yield from self._evaluate(held, self._every_task())
            return
        is_due = self._assembly.timetable.evaluation.due_at(step)
        yield from self._evaluate(held if is_due else None, [] if self._tasks is None else self._tasks.due_at(step))

    def _every_task(self) -> "list[ScoredTask]":
        return [] if self._tasks is None else self._tasks.every

    def _evaluate(self, held: HeldOut | None, tasks: "Sequence[ScoredTask]") -> Iterator[Event]:
        progress = self._progress
        if held is None and not tasks:
            return
        progress.evaluation_owed = True
        phase.enter(f"evaluation after step {progress.step}")
        yield from self._log.flush()
        try:
            with self._log.clock.pause() as pause:
                found = self._found(held, tasks)
                self._keep(found)
        except EvaluationCutError:
            self._console.say("eval", f"step {progress.step}: cut short; it is repeated when the run is resumed")
            return
        measured = found.line()
        progress.evaluated(measured)
        progress.best = best_after(progress.best, self._assembly.keeps, progress.step, measured)
        if progress.early is not None and progress.early.is_due:
            self._console.say("ending", progress.early.reason())
        figures = {name: finite(value) for name, value in (measured | found.averaged).items()}
        if None in figures.values():
            lost = ", ".join(name for name, value in figures.items() if value is None)
            self._console.warn(f"step {progress.step}: an evaluation's {lost} is not finite")
        line = {"kind": "eval", "step": progress.step, **figures, "eval_s": round(pause.seconds, 3), **found.times()}
        self._log.metrics.add(line)
        self._samples.flush()
        yield Event("evaluation", progress.step, progress.tokens, line)
        self._show(found.answers)
        if found.scores:
            from tuner.run.tasks.task_scores import say_scores

            say_scores(self._console, found.scores, found.tasks_s)

    def _found(self, held: HeldOut | None, tasks: "Sequence[ScoredTask]") -> EvaluationResult:
        """All that is due now. Raises EvaluationCutError on every rank where a signal came. Collective."""
        rows = None if held is None else self._measure(held)
        averaged = {} if held is None else self._measure_averages(held)
        measured = time.monotonic()
        answers = [] if held is None else self._answer_samples(held)
        answered = time.monotonic()
        scores: list[TaskScore] = []
        if tasks and self._tasks is not None:
            alone = not self._assembly.train_state.step_config.mesh.is_sharded
            is_whole = alone or self._has_room(warns=False)
            with self._console.doing("scoring tasks") as doing:
                heed = self._heeding(doing, lambda forwards: f"scoring tasks, {forwards:,} forwards")
                scores = self._tasks.score(tasks, is_whole, heed)
        return EvaluationResult(rows, answers, scores, averaged, answered - measured, time.monotonic() - answered)

    def _measure(self, held: HeldOut) -> Evaluation:
        """The losses of the held-out rows. Raises EvaluationCutError on every rank where a signal came."""
        state, at_once = self._assembly.train_state, self._assembly.batches.micro_batch_size
        rows = len(held.rows) if self._settings.max_rows is None else min(self._settings.max_rows, len(held.rows))
        at_a_time = at_once * state.step_config.mesh.data_size

        def between(batches: int) -> str:
            return f"evaluating {min(rows, batches * at_a_time):,} of {rows:,} rows"

        with self._console.doing(between(0)) as doing:
            heed = self._heeding(doing, between)
            own = ByTerms.of(state.method, self._assembly.batches.global_batch_size)
            return evaluate(state.root, state.step_config, held, at_once, self._settings.max_rows, heed, own)

    def _measure_averages(self, held: HeldOut) -> dict[str, float]:
        """The same of other weights than those that are trained, averages of them, by names that say so."""
        found: dict[str, float] = {}
        for part in self._assembly.train_state.parts:
            for prefix, in_place in part.other_weights().items():
                with in_place:
                    found |= {f"{prefix}{name}": value for name, value in self._measure(held).line().items()}
        return found

    def _heeding(self, doing: Updates, words: Callable[[int], str]) -> Callable[[], None]:
        """What is called before each forward: it counts them, and ends the work on a signal. Collective."""
        done = count()

        def between() -> None:
            doing.update(words(next(done)))
            if any_rank(self._signals.requested, gloo_group()):
                raise EvaluationCutError

        return between

    def _answer_samples(self, held: HeldOut) -> list[tuple[PreparedSample, str]]:
        """The answers to prompts, where they are due at this evaluation and there is room for the model. Collective."""
        assembly, progress, samples = self._assembly, self._progress, held.samples[: self._settings.samples]
        alone = assembly.rank_info.world_size == 1
        is_due = self._settings.samples_at == "all" or progress.step == 0 or progress.is_last_step
        if not is_due or not samples or not (alone or self._has_room()):
            return []

        def words(tokens: int) -> str:
            return f"sampling {counted(len(samples), 'answer')}, {tokens} tokens"

        with startup.phase("samples"), self._console.doing(words(0)) as doing:
            heed = self._heeding(doing, words)
            with nullcontext() if alone else self._gathered():
                answers = answer_samples(assembly.train_state, samples, assembly.tokenizer, heed)
        return list(zip(samples, answers, strict=True))

    def _gathered(self) -> AbstractContextManager[None]:
        from tuner.parallel.gathered import gathered

        return gathered(self._assembly.train_state.root)

    def _has_room(self, warns: bool = True) -> bool:
        """Whether each process has room for the whole model, with a warning where one has not. Collective.

        Without it every token of every answer would have all processes gather the model once more.
        """
        from tuner.parallel.gathered import whole_bytes

        assembly = self._assembly
        if (needed := whole_bytes(assembly.train_state.root)) == 0:
            return True
        free = room_on(assembly.train_state.step_config.device, assembly.rank_info.local_world_size)
        if not any_rank(needed * ROOM_FOR_SAMPLES > free, gloo_group()):
            return True
        if warns and not self._has_warned:
            self._console.warn(
                f"eval.samples: no answers, for which each process would need the whole model ({gib(needed)}) next to "
                f"its part of the run, and {gib(free)} are free; export a checkpoint and ask that one: tuner generate"
            )
        self._has_warned = self._has_warned or warns
        return False

    def _keep(self, found: EvaluationResult) -> None:
        if self._tasks is not None and found.scores:
            self._tasks.keep(self._progress.step, found.scores)
        for sample, answer in found.answers:
            said = {"prompt": sample.prompt_text, "answer": answer, "reference": sample.reference}
            self._samples.add({"step": self._progress.step, **said})

    def _show(self, answers: list[tuple[PreparedSample, str]]) -> None:
        """The first answer, with what was asked and wanted; the file has them all."""
        if not answers:
            return
        (sample, answer), *others = answers
        width = self._console.width - LABEL_WIDTH - 8
        lines = [
            f"prompt  {one_line(sample.prompt_text, width, end=True)}",
            f"wanted  {one_line(sample.reference, width)}",
            f"got     {one_line(answer, width)}",
        ]
        if others:
            lines.append(f"{len(others)} more in {self._directory / SAMPLES}")
        self._console.say("sample", "\n".join(lines))
