"""Where a profile measures: in this process, among those of torchrun or srun, or in local ranks, as training would."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.recipe import Recipe
from tuner.data.building.prepare import prepare
from tuner.data.building.request import prepare_request
from tuner.data.prepared import open_prepared
from tuner.profile.measure import ProfileReport, measure
from tuner.runtime.console import Console, Level
from tuner.runtime.launch import Launch
from tuner.runtime.process import process_group
from tuner.runtime.ranks import run_ranks
from tuner.train.launch import local_processes
from tuner.train.setup import check_division, resolve, timetable

RANK_MODULE = "tuner.profile.rank"


@dataclass(frozen=True)
class ProfileOptions:
    """What is measured: `steps` for time, memory judged against `limit_bytes` for each process or what is free."""

    steps: int
    limit_bytes: int | None = None
    dry_run: bool = False


def profile(loaded: LoadedRecipe, options: ProfileOptions, level: Level) -> tuple[int, ProfileReport | None]:
    """The steps of the whole run, and what a few of them cost; no report with `dry_run`. Data is prepared first.

    Raises TunerError children, with the failing rank's message and exit code, and KeyboardInterrupt.
    """
    place, wish = Launch.from_environment(), loaded.recipe
    console = Console(place.is_main, level)
    processes = 1 if Launch.is_given() else local_processes(wish.parallel, wish.train.device)
    request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    directory = prepare(request, console).path
    if processes == 1 or options.dry_run:
        here = place if processes == 1 else Launch(0, processes, 0, processes)
        return _measured(wish, directory, options, here, console)
    check_division(wish.train.global_batch_size, wish.train.micro_batch_size, processes)
    logs = Path(tempfile.mkdtemp(prefix="tuner-profile-"))
    work = {
        "recipe": recipe_dict(wish),
        "prepared": str(directory.absolute()),
        "options": asdict(options),
        "level": level,
    }
    plain = run_ranks(RANK_MODULE, work, processes, logs)
    shutil.rmtree(logs)  # after a failure they stay: the error names them
    return plain["total_steps"], ProfileReport(**plain["report"])


def profile_as_rank(work: Mapping[str, Any]) -> dict[str, Any]:
    """What each process started by `profile` does with the work given to it; returns its result as plain values."""
    place, wish = Launch.from_environment(), load_recipe(work["recipe"]).recipe
    options, console = ProfileOptions(**work["options"]), Console(place.is_main, work["level"])
    total_steps, report = _measured(wish, Path(work["prepared"]), options, place, console)
    return {"total_steps": total_steps, "report": None if report is None else asdict(report)}


def _measured(
    wish: Recipe, directory: Path, options: ProfileOptions, launch: Launch, console: Console
) -> tuple[int, ProfileReport | None]:
    request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    prepared = open_prepared(directory)
    resolved = resolve(wish, request.max_length, launch)
    plan, facts = timetable(resolved.recipe, prepared).plan, resolved.facts
    processes = f"{launch.world_size} process" + ("es" if launch.world_size > 1 else "")
    console.say(
        "plan",
        f"{plan.total_steps:,} steps of {plan.global_batch_size} rows; one measured for memory, {options.steps} for "
        f"time · {facts.kind}, {resolved.recipe.train.precision} compute, {processes} of {facts.threads} threads",
    )
    if options.dry_run:
        return plan.total_steps, None
    with process_group(launch, facts.kind, wish.parallel.timeout.seconds):
        report = measure(resolved, prepared, request.tokenizer, launch, options.steps, options.limit_bytes)
    return plan.total_steps, report
