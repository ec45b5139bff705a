"""The tasks of `eval.tasks` between steps: scored on the weights that train, their items' results kept in the run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import rmtree

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.config.eval_tasks import EvalTask
from tuner.errors import counted
from tuner.evals.figures import write_results
from tuner.evals.load import load_tasks, require_figure
from tuner.evals.scorer import Scorer
from tuner.evals.task import ScoredTask, TaskScore
from tuner.run.parts.part import LaunchContext
from tuner.rundir.layout import EVALUATIONS
from tuner.runtime.console import Console
from tuner.runtime.files import machine_errors
from tuner.runtime.process import Collective, gloo_group

SHOWN = 2
"""Figures of a task on the console; metrics.jsonl has all of them."""


class TaskScores:
    """The tasks of a launch with their items, cut at so many tokens; ``metric`` is what the best checkpoint is kept by.

    Raises what :func:`~tuner.evals.load.load_tasks` raises. Collective.
    """

    def __init__(self, context: LaunchContext, sections: Sequence[EvalTask], metric: str | None) -> None:
        assembly, max_length = context.assembly, context.assembly.resolved.max_length
        self._row_tokens = assembly.batches.micro_batch_size * max_length
        self._assembly, self._console = assembly, context.console
        self._directory = context.run.path / EVALUATIONS
        with context.console.doing("reading the tasks"):
            self._tasks = load_tasks(sections, assembly.tokenizer, max_length)
        for section, task in zip(sections, self._tasks, strict=True):
            if metric is not None and metric.startswith(f"eval/{section.label}/"):
                require_figure(metric, section, task)

    def due_at(self, step: int) -> list[ScoredTask]:
        """The tasks that are scored after ``step``."""
        cadences = self._assembly.timetable.tasks
        return [task for task, cadence in zip(self._tasks, cadences, strict=True) if cadence.due_at(step)]

    @property
    def every(self) -> list[ScoredTask]:
        """All tasks."""
        return list(self._tasks)

    def score(self, tasks: Sequence[ScoredTask], is_whole: bool, between: Callable[[], None]) -> list[TaskScore]:
        """Score these tasks; ``between`` is called before each forward, and what it raises ends it. Collective."""
        # In forwards no larger than those of training.
        state = self._assembly.train_state
        scorer = Scorer(state.root, state.step_config, self._assembly.tokenizer, self._row_tokens, is_whole, between)
        return [task.score(scorer) for task in tasks]

    def keep(self, step: int, scores: Sequence[TaskScore]) -> None:
        """Write the results of items. Raises MachineError. Collective."""
        directory = self._directory / step_name(step)
        Collective(gloo_group()).on_rank0(lambda: write_scores(directory, scores))

    def drop_after(self, step: int) -> None:
        """Remove what was kept of later steps, which are taken again. Collective."""

        def remove() -> None:
            for number, path in step_dirs(self._directory):
                if number > step:
                    rmtree(path, ignore_errors=True)

        Collective(gloo_group()).on_rank0(remove)


def write_scores(directory: Path, scores: Sequence[TaskScore]) -> None:
    """Write the results of the items of each task to a file of its name. Raises MachineError."""
    with machine_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for score in scores:
            write_results(directory / f"{score.name}.jsonl", score.results)


def say_scores(console: Console, scores: Sequence[TaskScore], seconds: float) -> None:
    """The first figures of each task, what they cost, and what was cut."""
    shown = [
        f"{score.name} " + " ".join(f"{name} {value:.4f}" for name, value in list(score.figures.items())[:SHOWN])
        for score in scores
    ]
    console.say("tasks", "\n".join([*shown[:-1], f"{shown[-1]} · {seconds:.1f} s"]))
    for score in scores:
        if score.cut:
            console.warn(
                f"eval.tasks {score.name}: {counted(score.cut, 'prompt')} without the beginning; raise the task's "
                "max_length"
            )
