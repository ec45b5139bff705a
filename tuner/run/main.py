"""One launch of a run in this process: build, load the newest checkpoint, train, and leave the directory in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from tuner.checkpoint.load import newest
from tuner.checkpoint.manifest import step_name
from tuner.config.duration import StepRange
from tuner.config.load import LoadedRecipe
from tuner.config.methods import DistillMethod
from tuner.config.recipe import EvalSection, TrainSection
from tuner.errors import DivergedError, MachineError, MemoryLimitError, is_out_of_memory, memory_line
from tuner.run.begin import begin_launch
from tuner.run.changes import pending
from tuner.run.meta import GIVEN, require_same_data
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.preflight import Preflight, agreed, announce_packing, plan_launch, preflight
from tuner.run.previous import run_result
from tuner.run.state import LaunchContext, outcome, restore, run_state
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
from tuner.runtime.process import Collective, gloo_group, process_group
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly, build
from tuner.setup.resolve import Resolved
from tuner.train.loop import train_loop
from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import Criterion, EarlyStop, Progress
from tuner.train.tasks import Event, Status, Tasks

if TYPE_CHECKING:
    from tuner.run.tasks.export import Exporter
    from tuner.run.teacher_versions import TeacherVersions
    from tuner.run.windows.opened import OpenedWindows
    from tuner.rundir.windows import WindowPosition


def train(
    loaded: LoadedRecipe,
    options: LaunchOptions,
    rank_info: RankInfo,
    console: Console,
    exporter: Exporter | None = None,
) -> RunResult:
    """Train the recipe into its run directory. Every process of the run calls it.

    ``exporter`` exports checkpoints during the run, from rank 0. Raises TunerError children; nothing that was saved
    before is ever lost. A finished run with the same recipe is returned as it is.
    """
    with startup.phase("data"), console.doing("checking the run directory and the data"):
        ready = preflight(loaded, options, console, hashes=rank_info.is_main)
    if isinstance(ready, RunResult):
        return ready
    with startup.phase("plan"), console.doing("planning the run"):
        resolved, total_steps = plan_launch(ready, loaded, options, rank_info, console)
    if options.dry_run:
        _check_launch(loaded, resolved, ready, rank_info)
        return RunResult(ready.run.path, "planned", 0, total_steps, None, {"total_steps": total_steps})
    with (
        _main_holds(hold(ready.run.path), ready.run, rank_info),
        StopSignals(
            lambda name: console.say("stopping", f"{name}: after this step; repeat to stop at once")
        ) as signals,
        process_group(rank_info, resolved.facts.kind, loaded.recipe.parallel.timeout.seconds),
        _bound(resolved, rank_info, console),
        exactness(resolved.recipe.train),
        _memory_errors(resolved, rank_info),
    ):
        ready = agreed(ready, options, Collective(gloo_group()))
        phase.enter("set-up of the model")
        teachers, resolved = _teachers(ready, resolved)
        with startup.phase("weights"):
            assembly = _built(ready, resolved, rank_info, console)
        given = assembly.facts.given or {}
        if "summary" in given:
            console.say("init_from", given["summary"])
        if assembly.resolved.route != resolved.route:
            announce_packing(console, assembly.resolved, ready.data, planned=False)
        if ready.found is not None:
            reset = pending(ready.resets, ready.found.step)
            require_same_data(ready.found, assembly, reset, "data" in reset or ready.windows is not None)
        if assembly.train_state.method.reference != "none":
            assembly = _referred(ready, assembly, console, signals)
        if isinstance(resolved.recipe.method, DistillMethod) and resolved.recipe.method.top_k is not None:
            assembly = _taught(ready, assembly, console, signals)
        if teachers is not None:
            teachers.identify(assembly.teacher_facts)
        table = assembly.timetable
        early = _early_stop(resolved.recipe.eval, resolved.recipe.train.min_steps, assembly.keeps)
        progress = Progress(table.plan, table.data_start, early=early)
        windows = None if ready.windows is None else _windows(ready, ready.windows, assembly, progress)
        record = Collective(gloo_group()).on_rank0(lambda: begin_launch(ready, loaded, assembly, options, windows))
        console.keep(ready.run.logs / log_name(rank_info.rank))
        context = LaunchContext(ready.run, record, assembly, progress, ready.resets, console, signals, windows)
        context = replace(context, teachers=teachers)
        tasks = launch_tasks(context, ready.found, exporter)
        return _run(context, ready, record, tasks)


def _built(ready: Preflight, resolved: Resolved, rank_info: RankInfo, console: Console) -> Assembly:
    """What the launch trains with; kernels that are compiled first are tried. Collective."""
    if ready.found is not None and resolved.recipe.model.init_from:
        resolved = replace(resolved, given=ready.found.meta[GIVEN])

    def make(resolved: Resolved) -> Assembly:
        return build(resolved, ready.data, ready.spec.tokenizer, rank_info, ready.starts)

    if resolved.facts.kind == "cpu" and resolved.recipe.train.compile is False:
        with console.doing("loading model"):
            return make(resolved)
    from tuner.setup.first_kernels import build_runnable

    return build_runnable(resolved, make, console)


def _referred(ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
    """The assembly with what the reference gives its documents, where that is not computed in each step. Collective."""
    from tuner.run.reference import referred

    phase.enter("reference")
    with startup.phase("reference"):
        return referred(ready, assembly, console, lambda: signals.requested)


def _taught(ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
    """The assembly with what the teacher gives its trained tokens. Collective."""
    from tuner.run.teacher import taught

    phase.enter("teacher")
    with startup.phase("teacher"):
        return taught(ready, assembly, console, lambda: signals.requested)


def _teachers(ready: Preflight, resolved: Resolved) -> tuple[TeacherVersions | None, Resolved]:
    """The versions of the teacher, where newer ones are looked for, and the recipe with the one at hand. Collective."""
    method = resolved.recipe.method
    if not isinstance(method, DistillMethod) or method.teacher_every is None:
        return None, resolved
    from tuner.run.teacher_versions import begin_versions

    teachers = begin_versions(method, ready.run, ready.record, ready.found, ready.spec.cache_dir)
    return teachers, replace(resolved, teacher=str(teachers.path))


def _windows(ready: Preflight, position: WindowPosition, assembly: Assembly, progress: Progress) -> OpenedWindows:
    """The windows of the run as the launch begins with them."""
    from tuner.run.windows.opened import OpenedWindows, may_follow

    progress.more_to_come = not position.ended and may_follow(assembly, progress)
    return OpenedWindows(ready.spec, position.with_last_step(progress.plan.total_steps))


def _check_launch(loaded: LoadedRecipe, resolved: Resolved, ready: Preflight, rank_info: RankInfo) -> None:
    """Check what the launch would build. Raises RecipeError with every problem."""
    from tuner.setup.check_model import check_setup
    from tuner.setup.findings import Findings

    found = Findings(loaded)
    check_setup(resolved, ready.data, ready.spec.tokenizer, rank_info, found)
    found.raise_any()


def _run(context: LaunchContext, ready: Preflight, record: dict[str, Any], launch: LaunchTasks) -> RunResult:
    """Train from where the run is to where this launch ends, and write down how it ended."""
    run, progress, tasks, main = context.run, context.progress, launch.tasks, context.assembly.rank_info.is_main
    status: Status = "failed"
    why: str | None = None
    try:
        if ready.found is not None:
            if ready.found.path.parent == run.checkpoints:
                progress.saved_step = ready.found.step  # it is there, whether or not it can be restored
            with startup.phase("checkpoint"), context.console.doing("loading checkpoint"):
                restore(context, ready.found)
        launch.cut_back(progress.step if ready.found is not None else -1, progress.evaluation_owed)
        if context.assembly.resolved.recipe.train.mock_batch is True:
            from tuner.setup.mock import mock_batch

            with tasks.around_step(0):
                mock_batch(context.assembly, context.console)
        finished = _loop(context, tasks)
        Collective(gloo_group()).on_rank0(launch.hooks.raise_error)
        status, why = ("finished", _why_early(progress)) if finished else ("stopped", launch.stop.reason(main))
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
            record["launches"][-1]["total_steps"] = progress.plan.total_steps  # of data in windows it grows
            run.end(record, status, progress.step, progress.saved_step, why)
        tasks.notify(Event("end", progress.step, progress.tokens, status=status))
    Collective(gloo_group()).on_rank0(launch.hooks.raise_error)
    saved = newest(run.checkpoints, verify=False) if progress.saved_step is not None else None
    ended: Literal["finished", "stopped"] = "finished" if finished else "stopped"
    return run_result(run, ended, saved, progress.plan.total_steps, run_state(context, finished))


def _early_stop(section: EvalSection, min_steps: int | None, keeps: Criterion | None) -> EarlyStop | None:
    """What ends the run early, where the recipe has a patience: by what the best is kept by, or else by the loss."""
    if section.patience is None:
        return None
    return EarlyStop(section.patience, section.min_delta, keeps or Criterion(), min_steps=min_steps or 0)


def _why_early(progress: Progress) -> str | None:
    """Why a finished run has fewer steps than were planned; None where it has all."""
    return None if progress.early is None or progress.is_last_step else progress.early.reason()


def _loop(context: LaunchContext, tasks: Tasks) -> bool:
    assembly, progress = context.assembly, context.progress
    start, end = progress.step - progress.data_start, progress.plan.total_steps - progress.data_start
    train = assembly.resolved.recipe.train
    _announce_skips(train.steps_to_skip, progress, context.console)
    with Prefetcher(assembly.batches, start, end, train.overfit_first_batch) as batches, calm_collector():
        if context.windows is not None:
            context.windows.batches = batches
        schedule = assembly.timetable.schedule
        return train_loop(assembly.train_state, progress, batches, schedule, tasks, train.steps_to_skip)


def _announce_skips(ranges: Sequence[StepRange], progress: Progress, console: Console) -> None:
    """Say which steps are still to come that the recipe leaves out, and warn of those that the run has not."""
    last = progress.plan.total_steps
    if ahead := [str(steps) for steps in ranges if progress.step < steps.last and steps.first <= last]:
        console.say("skips", f"{', '.join(ahead)}: nothing is trained in these steps (train.steps_to_skip)")
    beyond = [str(steps) for steps in ranges if steps.last > last]
    if beyond and not progress.more_to_come:
        console.warn(f"train.steps_to_skip: {', '.join(beyond)} reaches beyond the last step, {last}")


def _diverged(context: LaunchContext, halted: HaltedError) -> DivergedError:
    """The error of a run that must end, naming the step, its rows and the first module that failed. Collective."""
    from tuner.train.diagnose import diverged

    saved = context.progress.saved_step
    last = None if saved is None else str(context.run.checkpoints / step_name(saved))
    return diverged(context.assembly.train_state, halted.taken, halted.result, last)


@contextlib.contextmanager
def _main_holds(lock: FileLock, run: RunDir, rank_info: RankInfo) -> Iterator[None]:
    """Only rank 0 writes to the run directory, so only it takes the lock."""
    if not rank_info.is_main:
        yield
        return
    try:
        make_dirs(run.path)
    except OSError as error:
        raise MachineError(f"{run.path}: {error.strerror}", hint="choose an output_dir that can be written") from error
    with lock:
        yield


@contextlib.contextmanager
def _bound(resolved: Resolved, rank_info: RankInfo, console: Console) -> Iterator[None]:
    """This process on the cores that `parallel.numa_binding` gives it; how many threads it has is settled by then."""
    mode = resolved.recipe.parallel.numa_binding
    if mode == "none":
        yield
        return
    from tuner.runtime.numa import bound

    with bound(mode, rank_info, resolved.facts.kind) as cores:
        console.say("cores", f"{cores} (parallel.numa_binding: {mode})")
        yield


def exactness(train: TrainSection) -> contextlib.ExitStack:
    """How exactly kernels compute, where the recipe says more than that they are torch's own."""
    stack = contextlib.ExitStack()
    if train.deterministic or train.tf32:
        from tuner.runtime.deterministic import deterministic, tf32_products

        stack.enter_context(deterministic(train.deterministic))
        stack.enter_context(tf32_products(train.tf32))
    return stack


@contextlib.contextmanager
def _memory_errors(resolved: Resolved, rank_info: RankInfo) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        from tuner.setup.less_memory import less_memory

        said = f"out of memory: {memory_line(error)}"
        raise MemoryLimitError(said, hint=less_memory(resolved.recipe, rank_info.world_size)) from error
