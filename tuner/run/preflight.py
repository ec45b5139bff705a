"""Before a launch: what the run directory holds, whether the recipe belongs to it, and the prepared data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.checkpoint.load import CheckpointInfo, open_checkpoint
from tuner.checkpoint.manifest import SEAL
from tuner.config.load import LoadedRecipe
from tuner.data.building.prepare import find_prepared, prepare, prepared_path
from tuner.data.building.spec import PrepareSpec, prepare_spec
from tuner.data.prepared import PreparedData, open_prepared
from tuner.errors import DataError, RecipeError
from tuner.run.options import HandedOver, LaunchOptions, RunResult
from tuner.run.previous import find_checkpoint, finished_result
from tuner.run.resets import Reset, resets_for
from tuner.run.tasks.launch_tasks import check_observers
from tuner.run.trial import try_optimizer
from tuner.rundir.directory import RunDir
from tuner.runtime.collective import Collective
from tuner.runtime.console import Console
from tuner.train.custom_schedule import check_schedule
from tuner.train.methods.custom import check_method


@dataclass(frozen=True)
class Preflight:
    """What is known before a launch: the run's directory and past, and its data."""

    run: RunDir
    record: dict[str, Any] | None
    found: CheckpointInfo | None
    resets: tuple[Reset, ...]
    """All of the run; those at the step of `found` are this launch's to do."""
    spec: PrepareSpec
    data: PreparedData
    data_dir: Path


def preflight(
    loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool = True
) -> Preflight | RunResult:
    """Look at the run directory and prepare the data: what needs no device and no other process.

    Without `hashes` the checkpoint's tensors are left to another rank to check. The result of a run that is finished
    already. Raises TunerError children; only prepared data is written.
    """
    if options.handed_over is not None:
        return _handed_over(loaded, options, options.handed_over)
    recipe = loaded.recipe
    run = RunDir(Path(recipe.output_dir))
    record = run.read_record()
    if options.reset and options.resume == "never":
        raise RecipeError("--reset needs a run to resume", hint="add --resume auto, must or a PATH")
    found = find_checkpoint(run, record, loaded, options, console, hashes)
    resets = resets_for(record, found, options.reset)
    if record is not None and not options.reset:
        result = finished_result(run, record, found, loaded, options, console)
        if result is not None:
            return result
    check_observers(recipe.hooks, recipe.logging)
    check_method(recipe.method)
    check_schedule(recipe.schedule)
    try_optimizer(recipe.optimizer)
    spec = _spec(loaded)
    directory = _data_dir(spec, options, console)
    return Preflight(run, record, found, resets, spec, open_prepared(directory), directory)


def agreed(ready: Preflight, options: LaunchOptions, ranks: Collective) -> Preflight:
    """What rank 0 found of the checkpoint, whose tensors it hashed, on every rank. Collective.

    Each rank looked for itself. Raises DataError on all where one reads another manifest at the same path.
    """
    mine = ready.found
    chosen = ranks.on_all_ranks(lambda: None if mine is None else (str(mine.path), mine.manifest[SEAL]))
    found: list[CheckpointInfo | None] = [mine]

    def adopt() -> None:
        if chosen[0] == chosen[ranks.rank]:
            return
        found[0] = None if chosen[0] is None else open_checkpoint(Path(chosen[0][0]), verify=False)
        if found[0] is not None and chosen[0] is not None and found[0].manifest[SEAL] != chosen[0][1]:
            raise DataError(
                f"{found[0].path}: another manifest than rank 0 reads there",
                hint="all processes must see one file system",
            )

    ranks.on_all_ranks(adopt)
    if found[0] is mine:
        return ready
    return replace(ready, found=found[0], resets=resets_for(ready.record, found[0], options.reset))


def _handed_over(loaded: LoadedRecipe, options: LaunchOptions, given: HandedOver) -> Preflight:
    """What the process that started this rank has looked at and prepared a moment ago."""
    run = RunDir(Path(loaded.recipe.output_dir))
    record = run.read_record()
    found = None if given.checkpoint is None else open_checkpoint(given.checkpoint, verify=False)
    resets, spec = resets_for(record, found, options.reset), _spec(loaded)
    return Preflight(run, record, found, resets, spec, open_prepared(given.prepared), given.prepared)


def _spec(loaded: LoadedRecipe) -> PrepareSpec:
    recipe = loaded.recipe
    return prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)


def _data_dir(spec: PrepareSpec, options: LaunchOptions, console: Console) -> Path:
    if options.prepared is not None:
        data = open_prepared(options.prepared, verify=True)
        wanted = prepared_path(spec).name
        if data.key != wanted:
            raise DataError(
                f"{options.prepared}: was not prepared by this recipe (key {data.key}, the recipe's is {wanted})",
                hint="prepare it: tuner prepare-data RECIPE",
            )
        return options.prepared
    if options.no_prepare and find_prepared(spec) is None:
        raise DataError("the data is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
    return prepare(spec, console).path
