"""Where a profile measures: in this process, among those of torchrun or srun, or in local ranks, as training would."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.recipe import Recipe
from tuner.data.building.prepare import prepare
from tuner.data.building.request import prepare_request
from tuner.data.prepared import open_prepared
from tuner.profile.measure import MeasureOptions, measure
from tuner.profile.measurement import Measurement, from_plain
from tuner.run.launch import local_processes
from tuner.run.setup import check_division, resolve, timetable
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.runtime.spawn import run_ranks

RANK_MODULE = "tuner.profile.rank"


def measure_recipe(
    loaded: LoadedRecipe, options: MeasureOptions, level: Level, dry_run: bool = False
) -> tuple[int, Measurement | None]:
    """The steps of the whole run, and what a few of them cost; nothing with `dry_run`. Data is prepared first.

    Raises TunerError children, with the failing rank's message and exit code, and KeyboardInterrupt.
    """
    place, wish = RankInfo.from_environment(), loaded.recipe
    console = Console(place.is_main, level)
    processes = 1 if RankInfo.is_given() else local_processes(wish.parallel, wish.train.device)
    request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    directory = prepare(request, console).path
    if processes == 1 or dry_run:
        here = place if processes == 1 else RankInfo(0, processes, 0, processes)
        return _measured(wish, directory, options, here, console, dry_run)
    check_division(wish.train.global_batch_size, wish.train.micro_batch_size, processes)
    logs = Path(tempfile.mkdtemp(prefix="tuner-profile-"))
    work = {
        "recipe": recipe_dict(wish),
        "prepared": str(directory.absolute()),
        "steps": options.steps,
        "limit_bytes": options.limit_bytes,
        "output": None if options.output is None else str(options.output.absolute()),
        "level": level,
    }
    plain = run_ranks(RANK_MODULE, work, processes, logs)
    shutil.rmtree(logs)  # after a failure they stay: the error names them
    return plain["total_steps"], from_plain(plain["found"])


def profile_as_rank(work: Mapping[str, Any]) -> dict[str, Any]:
    """What each process started by `measure_recipe` does with the work given to it; its result as plain values."""
    place, wish = RankInfo.from_environment(), load_recipe(work["recipe"]).recipe
    output = None if work["output"] is None else Path(work["output"])
    options, console = MeasureOptions(work["steps"], work["limit_bytes"], output), Console(place.is_main, work["level"])
    total_steps, found = _measured(wish, Path(work["prepared"]), options, place, console)
    return {"total_steps": total_steps, "found": None if found is None else asdict(found)}


def _measured(  # noqa: PLR0917 - what one process needs
    wish: Recipe, directory: Path, options: MeasureOptions, rank_info: RankInfo, console: Console, dry_run: bool = False
) -> tuple[int, Measurement | None]:
    request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
    prepared = open_prepared(directory)
    resolved = resolve(wish, request.max_length, rank_info, request.tokenizer.new_ids)
    plan, facts = timetable(resolved.recipe, prepared).plan, resolved.facts
    processes = f"{rank_info.world_size} process" + ("es" if rank_info.world_size > 1 else "")
    console.say(
        "plan",
        f"{plan.total_steps:,} steps of {plan.global_batch_size} rows; one measured for memory, {options.steps} for "
        f"time · {facts.kind}, {resolved.recipe.train.precision} compute, {processes} of {facts.threads} threads",
    )
    if dry_run:
        return plan.total_steps, None
    with process_group(rank_info, facts.kind, wish.parallel.timeout.seconds):
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
        return plan.total_steps, measure(resolved, prepared, request.tokenizer, rank_info, options)
