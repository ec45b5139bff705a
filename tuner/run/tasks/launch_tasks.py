"""The tasks of a launch, in their order, and the one that ends it before its run is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.checkpoint.open import CheckpointInfo
from tuner.checkpoint.save import CheckpointDir
from tuner.config.numbers import Duration
from tuner.config.recipe import HealthSection
from tuner.run.parts.part import LaunchContext, TaskNeeds
from tuner.run.state import frozen_meta, run_meta, tokenizer_meta
from tuner.run.tasks.console import ConsoleTask, Due, StartupTask, TimeLeft, columns_of
from tuner.run.tasks.evaluate import EvaluateTask
from tuner.run.tasks.hooks import Hooks, Registration, RunFacts, user_hook
from tuner.run.tasks.log import LogTask, MemoryTask, step_columns
from tuner.run.tasks.record import RecordTask
from tuner.run.tasks.save import Saver, SaveTask
from tuner.rundir.layout import METRICS, SAMPLES, STOP, rank_metrics
from tuner.rundir.records import Records
from tuner.runtime.memory import FreedMemory
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.resolve import method_section
from tuner.setup.specs import TaskSections, task_sections
from tuner.train.plan import cadence
from tuner.train.tasks import Request, Task, Tasks

if TYPE_CHECKING:
    from tuner.run.tasks.export import Exporter
    from tuner.run.tasks.health import HealthTask
    from tuner.run.tasks.task_scores import TaskScores


@dataclass(frozen=True)
class LaunchTasks:
    """The tasks, and those of them that the end of a launch asks."""

    tasks: Tasks
    hooks: Hooks
    stop: StopTask
    records: Sequence[Records]

    def drop_after(self, step: int, evaluates: bool) -> None:
        """Drop what the records say of later steps; with ``evaluates``, of this one's evaluation, too."""
        for records in self.records:
            records.drop_after(step, evaluates)


def launch_tasks(context: LaunchContext, found: CheckpointInfo | None, exporter: Exporter | None) -> LaunchTasks:
    """Build the tasks of a launch that resumes from the checkpoint ``found``; rank 0 exports with ``exporter``.

    Between two steps each runs after the one before it in this list. Collective; raises PluginError and MachineError
    on every rank.
    """
    assembly, progress, console = context.assembly, context.progress, context.console
    resolved, main, run = assembly.resolved, assembly.rank_info.is_main, context.run
    sections, figures = task_sections(resolved), method_section(resolved).figures
    own = run.logs / rank_metrics(assembly.rank_info.rank) if sections.logging.metrics_of == "all" else None
    metrics, samples = Records(run.path / METRICS if main else own), Records(run.path / SAMPLES if main else None)
    from_step = 0 if found is None else found.step
    meta = run_meta(assembly) | (tokenizer_meta(run) if main else {"tokenizer_files": {}})
    facts = RunFacts(
        run.path, context.run_id, progress.plan.total_steps, meta["recipe"], from_step, assembly.rank_info.rank
    )
    hooks = Hooks(_registrations(context, sections), facts, progress)
    assembly.train_state.parts += (hooks,) if hooks.wants_batches else ()
    free_bytes = resolved.facts.free_bytes // assembly.rank_info.local_world_size
    columns = tuple(step_columns(sections)) if main or own else ()  # who has the lines of earlier launches
    log = LogTask(progress, metrics, assembly.mfu, assembly.train_state.step_config.device, columns)
    health = _health(context, sections.health, log)
    verify = (lambda: None) if health is None else health.before_save
    checkpoints = CheckpointDir(run.checkpoints, context.run_id)
    saver = Saver(
        assembly, sections.checkpoint, checkpoints, lambda step: meta | _meta_at(context, step), (metrics, samples),
        sections.timeout_s, verify,
    )  # fmt: skip
    resumed_from = found.path if found is not None and found.path.parent == run.checkpoints else None
    stop = StopTask(context, sections.stop_after, sections.stop_file)
    has_held_out, at_end = assembly.held_out is not None, sections.checkpoint.at_end
    time_left = TimeLeft(Due.of(assembly.timetable, sections.eval, has_held_out, at_end))
    needs = TaskNeeds(log, stop.request, time_left, saver.write_by)
    tasks: list[Task] = [
        *([StartupTask(run, context.record, console, resolved.compiles)] if main else []),
        hooks,
        *_around_steps(context, sections, exporter, saver, hooks),
        saver,
        log,
        *([MemoryTask(FreedMemory(free_bytes))] if resolved.facts.kind == "cpu" else []),
        stop,
        *_measures(context, sections, log),
        *([] if health is None else [health]),
        *_of_parts(context, needs, after_saves=False),
        EvaluateTask(context, sections.eval, log, samples, _task_scores(context, sections)),
        SaveTask(context, saver, log, samples, time_left, resumed_from),
        ConsoleTask(
            console, metrics, sections.logging.console_every, progress, time_left, resolved.compiles,
            columns_of(figures, sections.logging.console),
        ),
        *_of_parts(context, needs, after_saves=True),
    ]
    return LaunchTasks(Tasks(tasks), hooks, stop, (metrics, samples))


def _meta_at(context: LaunchContext, step: int) -> dict[str, Any]:
    """What a manifest says besides, by when it is written."""
    of_parts = (part.facts(step) for part in context.parts)
    return frozen_meta(context.assembly) | {name: fact for facts in of_parts for name, fact in facts.items()}


def _registrations(context: LaunchContext, sections: TaskSections) -> list[Registration]:
    """Trackers first, then the user's hooks in their order; on ranks other than 0 those that each calls. Collective."""
    assembly, console = context.assembly, context.console
    tokens = assembly.prepared.train.tokens_per_row
    built, main = list[Registration](), assembly.rank_info.is_main

    def build() -> None:
        if sections.logging.trackers and main:
            from tuner.run.tasks.trackers.choose import tracker_hooks

            built.extend(tracker_hooks(sections.logging, console.say, console.warn))
        plan = assembly.timetable.plan
        own = (section for section in sections.hooks if main or section.ranks == "all")
        built.extend(user_hook(section, cadence(section.every, plan, tokens)) for section in own)

    Collective(gloo_group()).together(build)
    return built


def _around_steps(
    context: LaunchContext, sections: TaskSections, exporter: Exporter | None, saver: Saver, hooks: Hooks
) -> Iterator[Task]:
    """Exports during the run, the record of steps, what looks into modules: each but the second is imported only where
    the recipe asks for it. Raises RecipeError, on every rank alike."""
    if exporter is not None:
        from tuner.run.tasks.export import ExportTask

        yield ExportTask(exporter, context, saver.prune, hooks.exported)
    yield RecordTask(context.assembly, sections.profile, context.run.path, context.console)
    if sections.prober.steps:
        from tuner.run.tasks.prober import ProberTask

        yield ProberTask(context.assembly, sections.prober, context.run.path, context.console)


def _of_parts(context: LaunchContext, needs: TaskNeeds, after_saves: bool) -> list[Task]:
    """The tasks of the launch's parts that run here."""
    return [task for part in context.parts if part.after_saves is after_saves for task in part.tasks(context, needs)]


def _task_scores(context: LaunchContext, sections: TaskSections) -> TaskScores | None:
    """The tasks that evaluations score, where the recipe names any: others load nothing of them. Collective."""
    if not sections.eval.tasks:
        return None
    from tuner.run.tasks.task_scores import TaskScores

    return TaskScores(context, sections.eval.tasks, sections.checkpoint.keep_best)


def _health(context: LaunchContext, section: HealthSection, log: LogTask) -> HealthTask | None:
    """The task that checks devices and copies, where the recipe asks for it."""
    if section.every is None and not section.before_saves:
        return None
    from tuner.run.tasks.health import HealthTask

    return HealthTask(context, section, log)


def _measures(context: LaunchContext, sections: TaskSections, log: LogTask) -> Iterator[Task]:
    """The tasks that measure ranks and layers in the steps of a cadence, where the recipe asks for it."""
    if sections.health.times_every is not None:
        from tuner.run.tasks.health import RankTimesTask

        yield RankTimesTask(context, sections.health, log)
    if sections.logging.internals is not None:
        from tuner.run.tasks.internals import InternalsTask

        yield InternalsTask(context, sections.logging.internals, log)


class StopTask(Task):
    """Asks for a stop on a signal, for a file (STOP in the run directory, or `train.stop_file`), and after
    `train.stop_after`."""

    def __init__(self, context: LaunchContext, stop_after: Duration | None, stop_file: str | None) -> None:
        self._progress, self._signals = context.progress, context.signals
        self._file = context.run.path / STOP
        self._shared = None if stop_file is None else Path(stop_file)
        tokens = context.assembly.prepared.train.tokens_per_row
        self._limit = cadence(None if stop_after is None else (stop_after,), context.assembly.timetable.plan, tokens)
        self._first_step, self._started = self._progress.step, time.monotonic()

    def start(self) -> None:
        """This launch begins here and now."""
        self._first_step, self._started = self._progress.step, time.monotonic()

    def request(self) -> Request:
        """A stop, for whichever reason."""
        is_asked = self._signals.requested or self._file.exists() or self._is_shared
        return Request.STOP if is_asked or self._is_due else Request.NONE

    @property
    def _is_due(self) -> bool:
        """Whether the launch has had all that `train.stop_after` allows it."""
        steps, seconds = self._progress.step - self._first_step, time.monotonic() - self._started
        return (steps > 0 and self._limit.due_at(steps)) or self._limit.due_after(seconds)

    @property
    def _is_shared(self) -> bool:
        return self._shared is not None and self._shared.exists()

    def reason(self, is_main: bool) -> str:
        """What asked for the stop; a file in the run directory has done its work then, and ``is_main`` removes it. One
        of several runs stays for the others."""
        asked = self._file.exists()
        if asked and is_main:
            self._file.unlink(missing_ok=True)
        if self._is_shared:
            other = f"{self._shared} (train.stop_file)"
        else:
            # The request was agreed on by all: it may be a tracker's, a hook's, or a signal that only another rank got.
            other = "stop_after" if self._is_due else "asked by a hook, a tracker or another process"
        return self._signals.signal_name or (STOP if asked else other)
