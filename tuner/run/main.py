"""One launch of a run in this process: build, load the newest checkpoint, train, and leave the directory in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from tuner.checkpoint.manifest import step_name
from tuner.checkpoint.open import CheckpointInfo, newest
from tuner.config.load import LoadedRecipe
from tuner.errors import DivergedError, MachineError
from tuner.run.changes import pending
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.parts.part import LaunchContext, Preflight
from tuner.run.preflight import agreed, plan_launch, preflight
from tuner.run.state import begin_launch, require_same_data, restore, run_state
from tuner.run.status import RunStatus, outcome, run_result
from tuner.run.tasks.launch_tasks import LaunchTasks, launch_tasks
from tuner.run.tasks.log import HaltedError
from tuner.rundir.directory import RunDir
from tuner.rundir.run_json import hold
from tuner.runtime import phase, startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo, log_name
from tuner.runtime.files import make_dirs
from tuner.runtime.lock import FileLock
from tuner.runtime.memory import calm_collector
from tuner.runtime.process import Collective, gloo_group
from tuner.runtime.stop import StopSignals
from tuner.setup.announce import announce_packing
from tuner.setup.build import Assembly, build
from tuner.setup.less_memory import memory_errors
from tuner.setup.resolve import Resolved
from tuner.setup.specs import joined
from tuner.train.loop import train_loop
from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import EarlyStop, Progress
from tuner.train.tasks import Event, Status, Tasks

if TYPE_CHECKING:
    from tuner.run.tasks.export import Exporter


def train(
    loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console,
    exporter: Exporter | None = None, status: RunStatus | None = None,
) -> RunResult:
    """Train the recipe into its run directory. Every process of the run calls it.

    ``exporter`` exports checkpoints during the run, from rank 0; ``status`` is what the command saw of the run
    directory, which is looked at here without it. Raises TunerError children; nothing that was saved before is ever
    lost. A finished run with the same recipe is returned as it is.
    """
    with startup.phase("data"), console.doing("checking the run directory and the data"):
        ready = preflight(loaded, options, console, status, hashes=rank_info.is_main)
    if isinstance(ready, RunResult):
        return ready
    with startup.phase("plan"), console.doing("planning the run"):
        resolved, total_steps = plan_launch(ready, loaded, options, rank_info, console)
    if options.dry_run:
        from tuner.setup.check_model import check_setup  # what else is found when the model is built

        check_setup(loaded, resolved, ready.data, ready.spec.tokenizer, rank_info)
        return RunResult(ready.status.run.path, "planned", 0, total_steps, None, {"total_steps": total_steps})
    with (
        _main_holds(hold(ready.status.run.path), ready.status.run, rank_info),
        StopSignals(
            lambda name: console.say("stopping", f"{name}: after this step; repeat to stop at once")
        ) as signals,
        joined(resolved, rank_info),
        _around(ready, resolved, rank_info, console),
        memory_errors(resolved, rank_info.world_size),
    ):
        ready = agreed(ready, Collective(gloo_group()))
        phase.enter("set-up of the model")
        for part in ready.parts:
            resolved = part.before_build(ready, resolved, console)
        with startup.phase("weights"):
            assembly = _built(ready, resolved, rank_info, console)
        if assembly.resolved.route != resolved.route:
            announce_packing(console, assembly.resolved, ready.data, planned=False)
        status = ready.status
        if status.checkpoint is not None:
            reset = pending(status.resets, status.checkpoint.step)
            other_data = "data" in reset or any(part.changes_data for part in ready.parts)
            require_same_data(status.checkpoint, assembly, loaded.recipe.data, reset, other_data)
        for part in ready.parts:
            assembly = part.after_build(ready, assembly, console, signals)
        table, recipe = assembly.timetable, loaded.recipe
        early = EarlyStop.of(recipe.eval, recipe.train.min_steps, assembly.keeps)
        progress = Progress(table.plan, table.data_start, early=early)
        for part in ready.parts:
            part.progress_created(ready, assembly, progress)
        record = Collective(gloo_group()).on_rank0(lambda: begin_launch(ready, assembly, loaded, options))
        console.keep(status.run.logs / log_name(rank_info.rank))
        context = LaunchContext(status.run, record, assembly, progress, status.resets, console, signals, ready.parts)
        return _run(context, status.checkpoint, launch_tasks(context, status.checkpoint, exporter))


def _built(ready: Preflight, resolved: Resolved, rank_info: RankInfo, console: Console) -> Assembly:
    """What the launch trains with; kernels that are compiled first are tried. Collective."""
    tokenizer, starts = ready.spec.tokenizer, ready.starts
    if resolved.facts.kind == "cpu" and not resolved.compiles:
        with console.doing("loading model"):
            return build(resolved, ready.data, tokenizer, rank_info, starts)
    from tuner.setup.first_kernels import build_runnable

    return build_runnable(resolved, ready.data, tokenizer, rank_info, starts, console)


def _run(context: LaunchContext, resume_from: CheckpointInfo | None, launch: LaunchTasks) -> RunResult:
    """Train from where the run is to where this launch ends, and write down how it ended."""
    run, record, progress, tasks = context.run, context.record, context.progress, launch.tasks
    main = context.assembly.rank_info.is_main
    status: Status = "failed"
    why: str | None = None
    try:
        if resume_from is not None:
            if resume_from.path.parent == run.checkpoints:
                progress.saved_step = resume_from.step  # it is there, whether or not it can be restored
            with startup.phase("checkpoint"), context.console.doing("loading checkpoint"):
                restore(context, resume_from)
        launch.drop_after(progress.step if resume_from is not None else -1, progress.evaluation_owed)
        for part in context.parts:
            part.before_steps(context, tasks)
        finished = _loop(context, tasks)
        Collective(gloo_group()).together(launch.hooks.raise_error)
        status, why = ("finished", progress.why_early) if finished else ("stopped", launch.stop.reason(main))
        why = progress.awaiting or why
    except HaltedError as halted:
        tasks.close()
        error = _diverged(context, halted)
        why = f"{type(error).__name__}: {error}"
        raise error from None
    except BaseException as error:
        tasks.close()
        why = f"{type(error).__name__}: {error}"
        raise
    finally:
        if main:
            record |= outcome(run_state(context, status == "finished"))
            record["launches"][-1]["total_steps"] = progress.plan.total_steps  # of data in portions it grows
            run.end(record, status, progress.step, progress.saved_step, why)
        tasks.notify(Event("end", progress.step, progress.tokens, status=status))
    Collective(gloo_group()).together(launch.hooks.raise_error)
    saved = newest(run.checkpoints, verify=False) if progress.saved_step is not None else None
    ended: Literal["finished", "stopped"] = "finished" if finished else "stopped"
    return run_result(run, ended, saved, progress.plan.total_steps, run_state(context, finished))


def _loop(context: LaunchContext, tasks: Tasks) -> bool:
    assembly, progress = context.assembly, context.progress
    rows = Prefetcher(assembly.batches, progress.plan.total_steps, progress.data_start, assembly.first_only)
    with rows, calm_collector():
        sources = [source for part in context.parts if (source := part.source(rows)) is not None]
        assert len(sources) <= 1, f"several parts make the rows of a step: {sources}"
        schedule, source = assembly.timetable.schedule, sources[0] if sources else rows
        return train_loop(assembly.train_state, progress, source, schedule, tasks, assembly.steps_to_skip)


def _diverged(context: LaunchContext, halted: HaltedError) -> DivergedError:
    """The error of a run that must end, naming the step, its rows and the first module that failed. Collective."""
    from tuner.train.diagnose import diverged

    saved = context.progress.saved_step
    last = None if saved is None else str(context.run.checkpoints / step_name(saved))
    return diverged(context.assembly.train_state, halted.taken, halted.result, last)


def _main_holds(lock: FileLock, run: RunDir, rank_info: RankInfo) -> contextlib.AbstractContextManager[object]:
    """Only rank 0 writes to the run directory, so only it takes the lock."""
    if not rank_info.is_main:
        return contextlib.nullcontext()
    try:
        make_dirs(run.path)
    except MachineError as error:
        error.hint = error.hint or "choose an output_dir that can be written"
        raise
    return lock


@contextlib.contextmanager
def _around(ready: Preflight, resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
    """What the launch's parts hold from here to its end."""
    with contextlib.ExitStack() as stack:
        for part in ready.parts:
            stack.enter_context(part.around(resolved, rank_info, console))
        yield
