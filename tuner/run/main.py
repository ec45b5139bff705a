"""One launch of a run: prepare, assemble, load the newest checkpoint, loop, and leave the directory in order."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from tuner.checkpoint.load import CheckpointInfo, load_into, newest
from tuner.checkpoint.save import CheckpointDir
from tuner.config.dump import recipe_dict, recipe_yaml
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.recipe import TIMES, Recipe
from tuner.errors import DataError, MachineError, MemoryLimitError, RecipeError
from tuner.model.vetting import ignored_code, ignored_losses
from tuner.run.changes import changes
from tuner.run.deterministic import deterministic
from tuner.run.hooks import Hooks, RunFacts, Status
from tuner.run.loop import train_loop
from tuner.run.meta import require_same_data, run_meta
from tuner.run.meter import Meter
from tuner.run.mock import mock_batch
from tuner.run.observers import build_hooks
from tuner.run.preflight import (
    LaunchOptions,
    Preflight,
    RunResult,
    agreed,
    preflight,
    require_recipe_of,
    run_result,
    tell_warnings,
)
from tuner.run.progress import MODEL, Progress, make_room, outcome, restore_position, run_tensors
from tuner.run.resets import STATE, freed_keys, pending, starts_of
from tuner.run.session import STOP_FILE, Session
from tuner.run.setup import Assembly, Resolved, Timetable, assemble, resolve, timetable
from tuner.run.tokenizer import tokenizer_meta, write_tokenizer
from tuner.run.watch import NoWatch, Watch
from tuner.rundir.directory import MODEL_CONFIG, TOKENIZER, RunDir
from tuner.rundir.records import Records
from tuner.runtime import phase
from tuner.runtime.collective import Collective
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import fsync_path, machine_error, make_dirs, write_atomic, write_json
from tuner.runtime.lock import FileLock
from tuner.runtime.memory import calm_collector
from tuner.runtime.process import gloo_group, process_group
from tuner.runtime.stop import StopSignals
from tuner.train.plan import steps_of
from tuner.train.prefetcher import Prefetcher


def train(loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console) -> RunResult:
    """Train the recipe into its run directory. Every process of the run calls it.

    Raises TunerError children; nothing that was saved before is ever lost. A finished run with the same recipe is
    returned as it is.
    """
    ready = preflight(loaded, options, console, hashes=rank_info.is_main)
    if isinstance(ready, RunResult):
        return ready
    recipe, run, record, found = loaded.recipe, ready.run, ready.record, ready.found
    request, data = ready.request, ready.data
    resolved = resolve(recipe, request.max_length, rank_info, request.tokenizer.new_ids)
    before = run.recipe(record)
    if record is not None and before is not None:
        _require_same_choices((before.recipe, recipe, resolved.recipe), run.path, options.reset, console)
    elif found is not None:
        require_recipe_of(found, recipe_dict(resolved.recipe), options.reset)
    table = timetable(resolved.recipe, data, starts_of(ready.resets))
    if record is None and found is not None and found.step >= table.plan.total_steps:
        raise RecipeError(f"{found.path}: no steps are left to train", hint="give an earlier checkpoint of its run")
    _announce(console, resolved, table, rank_info)
    if options.dry_run:
        return RunResult(run.path, "planned", 0, table.plan.total_steps, None, {"total_steps": table.plan.total_steps})
    timeout_s = recipe.parallel.timeout.seconds
    with (
        _main_holds(FileLock(run.path / "lock", wait=False), run, rank_info),
        StopSignals(lambda name: console.say("stopping", f"{name}: after this step; again to stop at once")) as signals,
        process_group(rank_info, resolved.facts.kind, timeout_s),
        deterministic(resolved.recipe.train.deterministic),
        _memory_errors(),
    ):
        ready = agreed(ready, options, Collective(gloo_group()))
        phase.enter("set-up of the model")
        assembly = assemble(resolved, data, request.tokenizer, rank_info, starts_of(ready.resets))
        return _run(ready, loaded, assembly, options, (signals, console))


def _run(
    ready: Preflight,
    loaded: LoadedRecipe,
    assembly: Assembly,
    options: LaunchOptions,
    around: tuple[StopSignals, Console],
) -> RunResult:
    signals, console = around
    run, found, table = ready.run, ready.found, assembly.timetable
    rank_info, progress, total = assembly.rank_info, Progress(resets=ready.resets), table.plan.total_steps
    if found is not None:
        require_same_data(found, assembly, "data" in pending(ready.resets, found.step))
    record = Collective(gloo_group()).on_rank0(lambda: _begin(ready, loaded, assembly, options))
    console.keep(run.logs / f"rank{rank_info.rank}.log")
    at = 0 if found is None else found.step
    facts = RunFacts(run.path, str(record["run_id"]), total, recipe_dict(assembly.resolved.recipe), at)
    hooks = build_hooks(assembly, facts, console, options.attach)
    watch = NoWatch() if options.watch is None else options.watch(assembly, run.path, console)
    session = _session(run, record, assembly, progress, (console, hooks, signals, watch))
    status: Status = "failed"
    why: str | None = None
    try:
        if found is not None:
            _restore(session, found)
        for records in (session.metrics, session.samples):
            records.cut_back(progress.step if found is not None else -1, progress.evaluation_owed)
        with watch.step(0):
            mock_batch(assembly, console)
        session.begin()
        first_only = assembly.resolved.recipe.train.overfit_first_batch
        start, stop = progress.step - table.data_start, total - table.data_start
        with (
            console.progress("train", total) as bar,
            Prefetcher(assembly.batches, start, stop, first_only) as feed,
            calm_collector(),
        ):
            session.meter.on_progress = bar.update
            finished = train_loop(session, feed)
        Collective(gloo_group()).on_rank0(session.hooks.raise_error)
        status, why = ("finished", None) if finished else ("stopped", _why_stopped(run, rank_info, signals))
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        session.close()
        session.metrics.flush()
        raise
    finally:
        if rank_info.is_main:
            record |= outcome(progress.as_state(status == "finished"))
            run.end(record, status, progress.step, progress.saved_step, why)
        session.hooks.tell("end", progress.step, progress.tokens, status=status)
    Collective(gloo_group()).on_rank0(session.hooks.raise_error)
    saved = newest(run.checkpoints, verify=False) if progress.saved_step is not None else None
    ended: Literal["finished", "stopped"] = "finished" if finished else "stopped"
    return run_result(run, ended, saved, total, progress.as_state(finished))


def _restore(session: Session, found: CheckpointInfo) -> None:
    """Put the run where a checkpoint says it was: this run's, or the one it branches off from. Collective."""
    assembly, progress = session.assembly, session.progress
    anew = pending(progress.resets, found.step)
    if STATE in anew:
        tensors = run_tensors(assembly)
        load_into(found, {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}, MODEL)
    else:
        make_room(assembly, found.state)
        load_into(found, run_tensors(assembly))
    restore_position(assembly, progress, found.state)
    origin = ""
    if found.path.parent == session.checkpoints.path:
        session.protected = (found.path,)
    else:  # what it goes on from is another run's, which this one neither counts nor prunes
        progress.saved_step = progress.best = None
        origin = f", from {found.path}"
    total = assembly.timetable.plan.total_steps
    session.console.say("resume", f"step {progress.step} of {total}{origin}")
    if anew:
        session.console.say("reset", f"{', '.join(anew)}: anew behind step {progress.step}")


def _begin(ready: Preflight, loaded: LoadedRecipe, assembly: Assembly, options: LaunchOptions) -> dict[str, Any]:
    """Fill the run directory with what every later command reads. Rank 0, under the run's lock."""
    run, record, found = ready.run, ready.record, ready.found
    if run.read_record() != record:
        raise MachineError(f"{run.path}: another launch used it meanwhile", hint="run the same command again")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.logs.mkdir(exist_ok=True)
    run.sweep()
    if record is not None:
        is_own = found is not None and found.path.parent == run.checkpoints
        run.set_aside(found.step if found is not None and is_own else -1, str(record["run_id"]))
    resolved = assembly.resolved
    # How long and on how many processes is each launch's own affair.
    of_run = {
        "train": resolved.recipe.train.model_copy(update={"stop_after": None}),
        "parallel": loaded.recipe.parallel,
    }
    settled = resolved.recipe.model_copy(update=of_run)
    begins = found is None or record is None
    if begins or not run.resolved_recipe.is_file():
        run.write_recipe(loaded.text, recipe_yaml(settled))
    if begins or not (run.path / TOKENIZER).is_dir():
        write_tokenizer(run, assembly)
    if begins or not (run.path / MODEL_CONFIG).is_dir():
        write_model_config(run.path / MODEL_CONFIG, resolved)
    facts = {
        "world_size": assembly.rank_info.world_size,
        "threads": torch.get_num_threads(),
        "device": resolved.facts.name,
        "cuda": torch.version.cuda,
        "from_step": 0 if found is None else found.step,
        "began_from": str(found.path) if found is not None and record is None else None,
        "total_steps": assembly.timetable.plan.total_steps,
        **({} if options.command is None else {"command": list(options.command)}),
    }
    # Where the user works, before where the recipe is: a run that goes on reads it from its own directory.
    work_dirs = [Path.cwd(), *([loaded.path.parent] if loaded.path is not None else [])]
    changed: dict[str, Any] = {"resets": [reset.as_state() for reset in ready.resets]} if ready.resets else {}
    if options.reset and record is not None:
        changed["recipe"] = recipe_dict(settled)
    record = run.begin(record, facts, work_dirs, changed)
    if "recipe" in record:  # for people and other commands; launches read the record
        write_atomic(run.resolved_recipe, recipe_yaml(load_recipe(record["recipe"]).recipe).encode())
    return record


def write_model_config(directory: Path, resolved: Resolved) -> None:
    """Write the model's config and its generation config. Raises MachineError, DataError for what is no JSON."""
    config = directory / "config.json"
    try:
        resolved.config.save_pretrained(directory)
        fsync_path(config)
    except OSError as error:
        raise machine_error(config, error) from error
    # Its own save refuses settings that published models ship, such as a temperature without sampling.
    try:
        write_json(directory / "generation_config.json", resolved.generation.to_dict())
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{resolved.recipe.model.name_or_path}/generation_config.json: cannot be written again: {error}",
            hint="take what is no plain value (Infinity, NaN) out of it",
        ) from error


def _session(
    run: RunDir,
    record: dict[str, Any],
    assembly: Assembly,
    progress: Progress,
    around: tuple[Console, Hooks, StopSignals, Watch],
) -> Session:
    console, hooks, signals, watch = around
    recipe, main, state = assembly.resolved.recipe, assembly.rank_info.is_main, assembly.train_state
    limit = recipe.train.stop_after
    total = assembly.timetable.plan.total_steps
    stop_after: Callable[[int, float], bool]
    if limit is None:
        stop_after = _never
    elif limit.unit not in TIMES:
        last = steps_of(limit, assembly.timetable.plan, assembly.prepared.train.tokens_per_row)
        stop_after = lambda steps, seconds: steps >= last  # noqa: E731 - one of three small rules
    else:
        allowed = limit.seconds
        stop_after = lambda steps, seconds: seconds >= allowed  # noqa: E731
    return Session(
        assembly=assembly,
        progress=progress,
        run_dir=run.path,
        checkpoints=CheckpointDir(run.checkpoints, str(record["run_id"])),
        meta=run_meta(assembly) | (tokenizer_meta(run) if main else {"tokenizer_files": {}}),
        metrics=Records(run.path / "metrics.jsonl" if main else None),
        samples=Records(run.path / "samples.jsonl" if main else None),
        console=console,
        meter=Meter(recipe.logging.console_every.seconds, state.step_config.device, total, assembly.effort),
        hooks=hooks,
        signals=signals,
        stop_after=stop_after,
        watch=watch,
    )


def _why_stopped(run: RunDir, rank_info: RankInfo, signals: StopSignals) -> str:
    """What asked for the stop; a stop file has done its work then."""
    asked = (run.path / STOP_FILE).exists()
    if asked and rank_info.is_main:
        (run.path / STOP_FILE).unlink(missing_ok=True)
    return signals.signal_name or (STOP_FILE if asked else "stop_after")


def _never(steps: int, seconds: float) -> bool:
    return False


def _require_same_choices(
    recipes: tuple[Recipe, Recipe, Recipe], run_dir: Path, reset: Collection[str], console: Console
) -> None:
    """A launch on another machine must not settle an `auto` into another run; where only bits differ it is told.

    Takes the recipes of the launches before, as it is written now, and as it is resolved now.
    """
    before, written, resolved = recipes
    resolved = resolved.model_copy(update={"parallel": written.parallel})  # of which a run keeps what was written, too
    freed = freed_keys(reset, before.optimizer.kind, resolved.optimizer.kind)
    changed, told = (changes(recipe_dict(before), recipe_dict(recipe), freed) for recipe in (resolved, written))
    if changed.refuse:
        raise RecipeError(
            f"{run_dir}: this machine resolves the recipe differently ({changed.shown()})",
            hint=f"keep the run's choices: tuner resume {run_dir}",
        )
    tell_warnings([line for line in changed.warn if line not in told.warn], console)


def _announce(console: Console, resolved: Resolved, table: Timetable, rank_info: RankInfo) -> None:
    recipe, plan, facts = resolved.recipe, table.plan, resolved.facts
    full = f"all but {', '.join(recipe.model.freeze)} trained" if recipe.model.freeze else "all trained"
    trained = full if recipe.adapter.kind == "none" else f"{recipe.adapter.kind} adapter trained"
    processes = f"{rank_info.world_size} process" + ("es" if rank_info.world_size > 1 else "")
    console.say(
        "model",
        f"{Path(recipe.model.name_or_path).name}, {resolved.n_parameters / 1e6:,.1f} M parameters, {trained} · "
        f"{facts.kind}, {recipe.train.precision} compute, {recipe.model.dtype} weights, "
        f"{facts.threads} thread{'s' if facts.threads != 1 else ''}",
    )
    micro = recipe.train.micro_batch_size
    accumulated = -(-plan.global_batch_size // (micro * rank_info.world_size))
    console.say(
        "plan",
        f"{plan.derivation(recipe.train.duration)} · micro-batch {micro} x {accumulated} x {processes} · "
        f"lr {table.peak_lr:g}"
        + (f" (auto: {resolved.reasons['optimizer.lr']})" if "optimizer.lr" in resolved.reasons else ""),
    )
    for ignored in (ignored_code(resolved.config), ignored_losses(resolved.config)):
        if ignored is not None:
            console.warn(f"{recipe.model.name_or_path}: {ignored}")
    console.say("run", recipe.output_dir)


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
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryLimitError(
            f"out of memory: {str(error).splitlines()[0]}", hint="lower train.micro_batch_size or data.max_length"
        ) from error
