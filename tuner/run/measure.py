"""Where a profile measures: in this process, among those of torchrun or srun, or in local ranks, as training would."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.data.building.prepare import prepare_to_use
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import counted
from tuner.profile.devices import find_device, parse_memory, parse_processes, present_device
from tuner.profile.measure import Measurement, MeasureOptions, measure
from tuner.profile.predict import Target
from tuner.run.launch import Placement, local_processes
from tuner.run.options import HandedOver, LaunchOptions, RankJob
from tuner.run.settle import LaunchData, settle
from tuner.runtime.console import Console, Level
from tuner.runtime.deterministic import tf32_products
from tuner.runtime.dist import RankInfo
from tuner.runtime.spawn import run_apart
from tuner.setup.resolve import resolve
from tuner.setup.specs import joined
from tuner.setup.timetable import timetable


@dataclass(frozen=True)
class MeasureJob:
    """What each rank measures; the data was prepared by the process that started it."""

    job: RankJob
    options: MeasureOptions


@dataclass(frozen=True)
class Measured:
    """The steps of the whole run, and what a few of them cost; None where that was only planned."""

    total_steps: int
    found: Measurement | None


MEASURE_JOB: TypeAdapter[MeasureJob] = TypeAdapter(MeasureJob)
MEASURED: TypeAdapter[Measured] = TypeAdapter(Measured)


def target_of(
    recipe: Recipe, device: str | None, processes: str | None, memory: str | None, option: str = "--memory"
) -> Target:
    """Where a recipe would run: on `device`, by default the one that is here, in `processes`, such as 8 or 4x8.

    Each process may take `memory`, which was given as `option`; by default what the device has. Raises RecipeError.
    """
    found = present_device(recipe.train.device) if device is None else find_device(device)
    if processes is not None:
        machines, each = parse_processes(processes)
    else:
        machines, each = 1, local_processes(recipe.parallel, found.kind)
    there = found.memory_bytes if found.kind == "cuda" else found.memory_bytes // each
    rank_info = RankInfo(0, machines * each, 0, each)
    host = found.host_bytes // each if device is None else None  # a device of the table says what each has
    return Target(found, rank_info, there if memory is None else parse_memory(option, memory), host)


def with_host_memory(target: Target, size: str) -> Target:
    """The target on hosts that have so much memory each, given as ``--host-memory``. Raises RecipeError."""
    return replace(target, host_bytes=parse_memory("--host-memory", size) // target.rank_info.local_world_size)


def measure_recipe(loaded: LoadedRecipe, options: MeasureOptions, level: Level) -> Measured:
    """Prepare the data and measure a few steps.

    Raises TunerError children, with the failing rank's message and exit code, and KeyboardInterrupt.
    """
    recipe, place = loaded.recipe, Placement.of(loaded.recipe)
    console = Console(place.rank_info.is_main, level)
    place.check(loaded)
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    directory = prepare_to_use(spec, console)
    at = LaunchData.of(directory, spec.cache_dir, options.dry_run, starts=place.local > 1)
    settled = settle(loaded, {}, place.planned, at, console)
    for key, reason in settled.reasons.items():
        console.say("settled", f"{key} {settled.values[key]}: {reason}")
    loaded = replace(loaded, recipe=settled.of(recipe))
    if place.local == 1 or options.dry_run:
        return _measured(loaded.recipe, directory, options, place.planned, console)
    given = HandedOver(directory.absolute(), None, ())
    job = MeasureJob(RankJob.of(loaded, LaunchOptions(level=level, handed_over=given)), options)
    plain = MEASURE_JOB.dump_python(job, mode="json")
    return MEASURED.validate_python(run_apart(measure_rank, plain, place.local, "profile", console.is_heard))


def measure_rank(work: dict[str, Any]) -> dict[str, Any]:
    """What each rank that `measure_recipe` starts does."""
    given = MEASURE_JOB.validate_python(work)
    rank_info, handed_over = RankInfo.from_environment(), given.job.options.handed_over
    assert handed_over is not None
    console = Console(rank_info.is_main, given.job.options.level)
    found = _measured(given.job.loaded().recipe, handed_over.prepared, given.options, rank_info, console)
    plain: dict[str, Any] = MEASURED.dump_python(found, mode="json")
    return plain


def _measured(
    recipe: Recipe, directory: Path, options: MeasureOptions, rank_info: RankInfo, console: Console
) -> Measured:
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    prepared = open_prepared(directory)
    resolved = resolve(recipe, spec.max_length, rank_info, spec.tokenizer.new_ids)
    plan, facts = timetable(resolved, prepared).plan, resolved.facts
    processes = counted(rank_info.world_size, "process", "processes")
    console.say(
        "plan",
        f"{counted(plan.total_steps, 'step')} of {counted(plan.global_batch_size, 'row')}; one measured for memory, "
        f"{options.steps} for time · {facts.kind}, {resolved.numerics.precision} compute, {processes} of "
        f"{counted(facts.threads, 'thread')}",
    )
    if options.dry_run:
        return Measured(plan.total_steps, None)
    with joined(resolved, rank_info), tf32_products(recipe.train.tf32):
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
        with console.doing("measuring some steps"):
            found = measure(resolved, prepared, spec.tokenizer, rank_info, options)
        return Measured(plan.total_steps, found)
