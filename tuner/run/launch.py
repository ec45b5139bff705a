"""Where a run trains: in this process, among those that torchrun or srun started, or in local ranks started here."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.recipe import ParallelSection
from tuner.errors import MachineError
from tuner.run.main import train
from tuner.run.observers import Attach
from tuner.run.preflight import LaunchOptions, RunResult, preflight
from tuner.run.setup import check_division
from tuner.run.watch import MakeWatch
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo
from tuner.runtime.environment import command_line
from tuner.runtime.spawn import run_ranks

RANK_MODULE = "tuner.run.rank"


def launch(
    loaded: LoadedRecipe, options: LaunchOptions, level: Level, module: str = RANK_MODULE, apart: bool = False
) -> RunResult:
    """Train the recipe, in as many processes as it asks for; messages of `level` and above go to stderr.

    Below torchrun and srun this process is one of theirs. Else `parallel.processes` of them start here: this one
    then checks the recipe and the run directory and prepares the data, and takes no part in training; each of them runs
    `module`. A single one is this process, or with `apart` one of its own. Raises TunerError children, with the failing
    rank's message and exit code, and KeyboardInterrupt.
    """
    place = RankInfo.from_environment()
    console = Console(place.is_main, level)
    processes = 1 if RankInfo.is_given() else local_processes(loaded.recipe.parallel, loaded.recipe.train.device)
    if processes == 1 and not apart:
        return train(loaded, options, place, console)
    batch = loaded.recipe.train
    check_division(batch.global_batch_size, batch.micro_batch_size, processes)
    if options.dry_run:
        return train(loaded, options, RankInfo(0, processes, 0, processes), console)
    ready = preflight(loaded, options, console)
    if isinstance(ready, RunResult):
        return ready
    logs = ready.run.logs
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{logs}: {error.strerror}", hint="choose an output_dir that can be written") from error
    work = {
        "recipe": recipe_dict(loaded.recipe),
        "text": loaded.text,
        "recipe_path": None if loaded.path is None else str(loaded.path),
        "command": command_line(),
        "resume": str(options.resume),
        "resume_is_path": isinstance(options.resume, Path),
        "prepared": str(ready.data_dir.absolute()),
        "checkpoint": None if ready.found is None else str(ready.found.path),
        "reset": list(options.reset),
        "level": level,
    }
    return _result_of(run_ranks(module, work, processes, logs))


def train_as_rank(
    work: Mapping[str, Any], attach: Attach | None = None, watch: MakeWatch | None = None
) -> RunResult:
    """What each process started by `launch` does with the work given to it."""
    path = _path(work["recipe_path"])
    loaded = dataclasses.replace(load_recipe(work["recipe"]), text=work["text"], path=path)
    options = LaunchOptions(
        Path(work["resume"]) if work["resume_is_path"] else work["resume"],
        Path(work["prepared"]),
        checked=True,
        checkpoint=_path(work["checkpoint"]),
        command=tuple(work["command"]),
        attach=attach,
        watch=watch,
        reset=tuple(work["reset"]),
    )
    place = RankInfo.from_environment()
    return train(loaded, options, place, Console(place.is_main, work["level"]))


def plain_result(result: RunResult) -> dict[str, Any]:
    """A rank's result as plain values, for the process that started it."""
    sys.stderr.flush()
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(result).items()}


def local_processes(section: ParallelSection, device: str) -> int:
    """How many processes a launch without a launcher's variables has: `auto` is one for each CUDA device, at least one.

    Asks the driver for the number of devices alone, so that this process takes no memory of any.
    """
    if section.processes != "auto":
        return section.processes
    return 1 if device == "cpu" else max(1, torch.cuda.device_count())


def _result_of(plain: dict[str, Any]) -> RunResult:
    paths = {"run_dir": Path(plain["run_dir"]), "checkpoint": _path(plain["checkpoint"])}
    return RunResult(**{**plain, **paths})


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
