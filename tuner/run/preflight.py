"""Before a launch: the run directory and the prepared data, then the recipe resolved for this machine and announced."""

from dataclasses import replace
from pathlib import Path

from tuner.checkpoint.open import open_checkpoint
from tuner.config.load import LoadedRecipe
from tuner.data.building.prepare import check_to_use, find_prepared, prepare_to_use, prepared_path
from tuner.data.building.spec import PrepareSpec
from tuner.data.prepared import WAY_TO_NAME, open_prepared
from tuner.errors import DataError, RecipeError
from tuner.model.build import fetch_weights
from tuner.run.changes import resets_for
from tuner.run.options import HandedOver, LaunchOptions, RunResult
from tuner.run.parts.listed import parts_of
from tuner.run.parts.part import LaunchRequest, Preflight
from tuner.run.settle import LaunchData, on_cuda, settled_for
from tuner.run.status import RunStatus, agreed_status, require_same_choices, status_of
from tuner.rundir.directory import RunDir
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective
from tuner.setup.announce import announce, announce_packing
from tuner.setup.resolve import Resolved, model_spec, resolve
from tuner.setup.timetable import few_steps, rates, timetable


def preflight(
    loaded: LoadedRecipe, options: LaunchOptions, console: Console, status: RunStatus | None = None, hashes: bool = True
) -> Preflight | RunResult:
    """Look at the run directory, fetch the weights and prepare the data: what needs no device and no other process.

    A run's ``status`` that is known already is not asked for again. Without `hashes` the checkpoint's tensors are left
    to another rank to check. The result of a run that is finished already. Raises TunerError children; only prepared
    data is written.
    """
    if options.handed_over is not None:
        return _handed_over(loaded, options, options.handed_over, console)
    status = status or status_of(loaded, options, console, hashes)
    if status.finished is not None:
        return status.finished
    recipe = loaded.recipe
    request, parts = LaunchRequest(loaded, options, status, console), parts_of(recipe)
    for part in parts:
        part.check(request)
    if not options.dry_run:
        with console.doing(f"fetching the weights of {recipe.model.name_or_path}"):
            fetch_weights(model_spec(recipe, range(0)))
    directory: Path | RunResult | None = None
    for part in parts:
        directory = directory or part.prepare_data(request)
    if isinstance(directory, RunResult):
        return directory
    if directory is None:
        directory = _data_dir(request.spec, options, console)
    return Preflight(status, request.spec, open_prepared(directory), directory, parts)


def agreed(ready: Preflight, ranks: Collective) -> Preflight:
    """What rank 0 saw before the launch, on every rank. Collective."""
    ready = replace(ready, status=agreed_status(ready.status, ranks))
    for part in ready.parts:
        if (directory := part.agree(ready.spec, ranks)) is not None:
            ready = replace(ready, data_dir=directory, data=open_prepared(directory))
    return ready


def _handed_over(loaded: LoadedRecipe, options: LaunchOptions, given: HandedOver, console: Console) -> Preflight:
    """What the process that started this rank has looked at and prepared a moment ago."""
    run, parts = RunDir(Path(loaded.recipe.output_dir)), parts_of(loaded.recipe)
    # Its files were hashed there a moment ago.
    checkpoint = None if given.checkpoint is None else open_checkpoint(given.checkpoint, verify=False)
    record = run.read_record()
    status = RunStatus(run, record, checkpoint, resets_for(record, checkpoint, options.reset))
    for part in parts:
        if (plain := given.parts.get(part.name)) is not None:
            part.take_over(plain)
    spec = LaunchRequest(loaded, options, status, console).spec
    return Preflight(status, spec, open_prepared(given.prepared), given.prepared, parts)


def _data_dir(spec: PrepareSpec, options: LaunchOptions, console: Console) -> Path:
    if options.prepared is not None:
        data = open_prepared(options.prepared, verify=True)
        wanted = prepared_path(spec).name
        if data.key != wanted:
            raise DataError(
                f"{options.prepared}: was not prepared by this recipe (key {data.key}, the recipe's is {wanted})",
                hint=WAY_TO_NAME,
            )
        check_to_use(spec, options.prepared, console)
        return options.prepared
    if options.no_prepare and find_prepared(spec) is None:
        raise DataError("the data is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
    return prepare_to_use(spec, console)


def plan_launch(
    ready: Preflight, loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console
) -> tuple[Resolved, int]:
    """The resolved recipe of a launch and the steps of the whole run, which are announced.

    Raises RecipeError where this machine resolves the recipe to another run than the one that is resumed.
    """
    checkpoint, given = ready.status.checkpoint, options.handed_over
    if not options.dry_run and rank_info.local_rank == 0 and on_cuda(loaded.recipe.train.device):
        from tuner.model.read_ahead import begin_reading  # while memory is predicted; a CPU needs its cores

        begin_reading(model_spec(loaded.recipe, range(0)))
    settled = None if given is None else given.settled
    if settled is None:
        place = LaunchData.of(ready.data_dir, ready.spec.cache_dir, options.dry_run)
        settled = settled_for(ready, loaded, rank_info, place, console)
    recipe = settled.of(loaded.recipe)
    resolved = resolve(recipe, ready.spec.max_length, rank_info, ready.spec.tokenizer.new_ids)
    reasons = {**resolved.reasons, **settled.reasons}
    resolved = replace(resolved, reasons=reasons, settled=dict(settled.values))
    require_same_choices(ready.status, loaded.recipe, resolved.recipe, options, console)
    table = timetable(resolved, ready.data, ready.starts)
    total_steps = table.plan.total_steps
    if ready.status.record is None and checkpoint is not None and checkpoint.step >= total_steps:
        said = f"{checkpoint.path}: no steps are left to train"
        raise RecipeError(said, hint="give an earlier checkpoint of its run")
    rate = rates(resolved, ready.data, table, ready.starts)
    derivations = (part.derivation(resolved, table) for part in ready.parts)
    announce(console, resolved, table, rate, rank_info, next(filter(None, derivations), None))
    for part in ready.parts:
        part.after_plan(resolved, rank_info, console)
    announce_packing(console, resolved, ready.data)
    if checkpoint is None and (few := few_steps(loaded.recipe, table.plan)) is not None:
        console.warn(few)
    for flaw in rate.flaws:
        console.warn(flaw)
    return resolved, total_steps
