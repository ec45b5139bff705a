"""Before a launch: what the run directory holds, whether the recipe belongs to it, and the prepared data."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tuner.checkpoint.load import CheckpointInfo, newest, open_checkpoint
from tuner.checkpoint.manifest import SEAL
from tuner.checkpoint.steps import step_dirs, step_name
from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.overrides import Override
from tuner.data.building.prepare import find_prepared, prepare, prepared_path
from tuner.data.building.request import PrepareRequest, prepare_request
from tuner.data.prepared import PreparedData, open_prepared
from tuner.errors import DataError, MachineError, RecipeError
from tuner.run.changes import Changes, changes
from tuner.run.observers import Attach, check_observers
from tuner.run.progress import METRICS, outcome
from tuner.run.resets import Reset, freed_keys, pending, resets_for, resets_of
from tuner.run.trial import try_optimizer
from tuner.run.watch import MakeWatch
from tuner.rundir.chosen import choose
from tuner.rundir.directory import RunDir
from tuner.rundir.last import last_step, way_to_whole
from tuner.runtime.collective import Collective
from tuner.runtime.console import Console
from tuner.runtime.lock import FileLock
from tuner.train.custom_schedule import check_schedule
from tuner.train.methods import check_method

Resume = Literal["auto", "must", "never"] | Path


@dataclass(frozen=True)
class LaunchOptions:
    """What a launch is told beside the recipe."""

    resume: Resume = "never"
    """auto goes on where there is a run to go on with, must fails without one, never refuses to touch one.

    A path, of a checkpoint or of a run with one, begins a new run there, and goes on with the run that began so.
    """
    prepared: Path | None = None
    """Prepared data to use instead of the cache's."""
    no_prepare: bool = False
    """Fail where the data is not prepared yet."""
    dry_run: bool = False
    """Say what would be done and stop; only prepared data may be written."""
    checked: bool = False
    """The process that started this one looked at the run directory and opened `prepared` a moment ago."""
    checkpoint: Path | None = None
    """With `checked`, the checkpoint that it chose to go on from, whose files it hashed."""
    command: tuple[str, ...] | None = None
    """The command line that the run records; this process's own unless another one started it."""
    attach: Attach | None = None
    """Hooks of the command's own."""
    watch: MakeWatch | None = None
    """The command's own look at steps."""
    reset: tuple[str, ...] = ()
    """Parts of the run that begin anew where it goes on, as `tuner.run.resets.parse_reset` gives them."""


@dataclass(frozen=True)
class Preflight:
    """What is known before a launch: the run's directory and past, and its data."""

    run: RunDir
    record: dict[str, Any] | None
    found: CheckpointInfo | None
    resets: tuple[Reset, ...]
    """All of the run; those at the step of `found` are this launch's to do."""
    request: PrepareRequest
    data: PreparedData
    data_dir: Path


@dataclass(frozen=True)
class RunResult:
    """How a launch ended."""

    run_dir: Path
    status: Literal["finished", "stopped", "planned"]
    step: int
    total_steps: int
    checkpoint: Path | None
    metrics: dict[str, Any]


def preflight(
    loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool = True
) -> Preflight | RunResult:
    """Look at the run directory and prepare the data: what needs no device and no other process.

    Without `hashes` the checkpoint's tensors are left to another rank to check. The result of a run that is finished
    already. Raises TunerError children; only prepared data is written.
    """
    recipe = loaded.recipe
    run = RunDir(Path(recipe.output_dir))
    record = run.read_record()
    if options.reset and options.resume == "never":
        raise RecipeError("--reset needs a run to go on with", hint="add --resume auto, must or a PATH")
    found = _handed_over(options) if options.checked else _existing(run, record, loaded, options, (console, hashes))
    resets = resets_for(record, found, options.reset)
    if record is not None and _is_finished(record, found, recipe.checkpoint.at_end) and not options.reset:
        step = int(record["launches"][-1].get("step") or (found.step if found is not None else 0))
        console.say("finished", f"{run.path} is already trained: {step} steps")
        state = record.get("metrics") or ({"step": step} if found is None else found.state)
        if not options.dry_run:
            _close(run, record, found)
        return run_result(run, "finished", found, step, state)
    check_observers(recipe.hooks, recipe.logging)
    check_method(recipe.method)
    check_schedule(recipe.schedule)
    try_optimizer(recipe.optimizer)
    request = prepare_request(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    directory = _data_dir(request, options, console)
    return Preflight(run, record, found, resets, request, open_prepared(directory), directory)


def agreed(ready: Preflight, options: LaunchOptions, ranks: Collective) -> Preflight:
    """What rank 0 made ready of the checkpoint, whose tensors it hashed, on every rank. Collective.

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


def resume_source(run_dir: Path, overrides: Sequence[Override] = ()) -> LoadedRecipe:
    """The recipe that a run directory goes on with. Raises RecipeError for a directory that holds no run."""
    run = RunDir(run_dir.absolute())
    if not run.path.is_dir():
        raise RecipeError(f"{run_dir}: no such directory", hint="give the run directory that tuner train printed")
    record = run.read_record()
    loaded = None if record is None else run.recipe(record)
    if loaded is None:
        raise RecipeError(f"{run_dir} holds no run that could go on", hint="start it with tuner train")
    if overrides:
        loaded = replace(load_recipe(recipe_dict(loaded.recipe), overrides), path=loaded.path, text=loaded.text)
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"output_dir": str(run.path)}))


def left_before(loaded: LoadedRecipe, options: LaunchOptions) -> RunResult | None:
    """What an earlier launch left to go on from, for a launch that ends before its first step; None without any."""
    run = RunDir(Path(loaded.recipe.output_dir))
    record, found = run.read_record(), newest(run.checkpoints, verify=False)
    total = record["launches"][-1].get("total_steps") if record is not None and record["launches"] else None
    if options.resume == "never" or found is None or total is None:
        return None
    return run_result(run, "stopped", found, int(total), found.state)


def _existing(
    run: RunDir,
    record: dict[str, Any] | None,
    loaded: LoadedRecipe,
    options: LaunchOptions,
    around: tuple[Console, bool],
) -> CheckpointInfo | None:
    """The checkpoint to go on from, after checking that the directory, the recipe and the wish agree."""
    console, hashes = around
    if record is None:
        if options.resume == "must":
            raise RecipeError(f"{run.path} holds no run to resume", hint="leave out --resume must")
        return _chosen(options.resume, loaded, options, around) if isinstance(options.resume, Path) else None
    origin = began(record)
    if isinstance(options.resume, Path) and (origin is None or options.resume not in (origin, origin.parent.parent)):
        raise RecipeError(
            f"{run.path} holds a run that did not begin from {options.resume}",
            hint=f"new run: --name NEW-NAME      go on with this one: tuner resume {run.path}",
        )
    before = run.recipe(record)
    if before is not None:
        freed = freed_keys(options.reset, before.recipe.optimizer.kind, loaded.recipe.optimizer.kind)
        changed = changes(recipe_dict(before.recipe), recipe_dict(loaded.recipe), freed)
        if changed.refuse:
            raise RecipeError(
                f"{run.path} holds a run with another recipe ({changed.shown()})",
                hint=f"new run: --name NEW-NAME      throw it away: tuner runs rm {run.path}      it was not touched",
            )
        if options.resume != "never" and not options.checked:
            _tell(changed, console)
    at_end = loaded.recipe.checkpoint.at_end
    found = newest(run.checkpoints, console.warn, shards=hashes)
    if found is not None and not hashes and _is_finished(record, found, at_end):
        found = newest(run.checkpoints, console.warn)  # every rank must say the same of it
    if found is None and step_dirs(run.checkpoints):
        raise DataError(
            f"{run.checkpoints}: none of its checkpoints is valid",
            hint=f"{way_to_whole(run.checkpoints, any_valid=False)}      new run: --name NEW-NAME",
        )
    if found is None and origin is not None:
        found = open_checkpoint(origin, shards=hashes)  # it ended before it saved one of its own, or lost them
    if options.resume == "never" and not _is_finished(record, found, at_end) and not options.dry_run:
        at = f"at step {found.step}" if found is not None else "without a checkpoint"
        raise RecipeError(
            f"{run.path} holds an unfinished run, {at}",
            hint=f"go on: tuner resume {run.path}      new run: --name NEW-NAME",
        )
    _tell_lost(run, record, found, console)
    return found


def _tell_lost(run: RunDir, record: Mapping[str, Any], found: CheckpointInfo | None, console: Console) -> None:
    """Warn of what of a run is not there any more, and from where it is made again."""
    at = 0 if found is None else found.step
    if not run.record.is_file():
        console.warn(f"{run.record} is gone: it is written again, from step {at} on")
    last = last_step(run.checkpoints, record)
    if last is not None and last > at and not (run.checkpoints / step_name(last)).is_dir():
        console.warn(f"{run.checkpoints / step_name(last)}, the last checkpoint, is gone: trained again from step {at}")


def _handed_over(options: LaunchOptions) -> CheckpointInfo | None:
    return None if options.checkpoint is None else open_checkpoint(options.checkpoint, verify=False)


def began(record: Mapping[str, Any]) -> Path | None:
    """The checkpoint of another run that a run's first launch went on from, if it did."""
    path = record["launches"][0].get("began_from") if record["launches"] else None
    return None if path is None else Path(path)


def require_recipe_of(found: CheckpointInfo, recipe: Mapping[str, Any], reset: Collection[str]) -> Changes:
    """What differs from the recipe that a checkpoint was saved with. Raises RecipeError where it is another run's."""
    before = found.meta["recipe"]
    changed = changes(before, recipe, freed_keys(reset, before["optimizer"]["kind"], recipe["optimizer"]["kind"]))
    if changed.refuse:
        raise RecipeError(
            f"{found.path} was saved with another recipe ({changed.shown()})",
            hint="take the values of its run, which recipe.resolved.yaml there holds",
        )
    return changed


def _tell(changed: Changes, console: Console) -> None:
    """Print what differs from the recipe that a run goes on with."""
    if changed.safe:
        console.say("changed", "\n".join(changed.safe))
    tell_warnings(changed.warn, console)


def tell_warnings(changed: Sequence[str], console: Console) -> None:
    """Warn of each changed key after which a run goes on less exactly."""
    for line in changed:
        console.warn(f"{line}: from here on not the same bits, or not the same measure")


def _chosen(
    path: Path, loaded: LoadedRecipe, options: LaunchOptions, around: tuple[Console, bool]
) -> CheckpointInfo:
    """The checkpoint at a path that the user gave, of a run its last one: a damaged one is fatal."""
    console, hashes = around
    if not path.is_dir():
        raise RecipeError(f"--resume {path}: no such directory", hint="give a checkpoint, auto, must or never")
    chosen = choose(path, console.warn, shards=hashes)
    found = open_checkpoint(path, shards=hashes) if chosen is None else chosen.checkpoint
    changed = require_recipe_of(found, recipe_dict(loaded.recipe), options.reset)
    if not options.checked:
        _tell(changed, console)
    return found


def _is_finished(record: Mapping[str, Any], found: CheckpointInfo | None, at_end: bool) -> bool:
    """Whether nothing is left to train: by a final checkpoint, or by the record where what it kept is there.

    A launch may have been killed before it could write down that it finished; a run that was reset after that
    checkpoint goes on. A finished run whose last checkpoint is damaged or gone goes on, too: `found` is the newest
    that is valid. With `at_end`, `checkpoint.at_end` of the recipe, that is the one of the last step.
    """
    if found is not None and found.state.get("finished") and not pending(resets_of(record), found.step):
        return True
    if record["status"] != "finished":
        return False
    newest_launch = record["launches"][-1]
    last = newest_launch.get("step") if at_end else newest_launch.get("saved_step")
    return last is None or (found is not None and found.step >= last)


def _close(run: RunDir, record: dict[str, Any], found: CheckpointInfo | None) -> None:
    """Do what a launch that was killed behind its last save left undone, unless another process holds the run."""
    if record["status"] == "finished" and not run.leftovers():
        return
    with suppress(MachineError), FileLock(run.path / "lock", wait=False):
        run.sweep()
        if record["status"] != "finished" and found is not None and run.read_record() == record:
            run.close(record | outcome(found.state), found.step)


def _data_dir(request: PrepareRequest, options: LaunchOptions, console: Console) -> Path:
    if options.prepared is not None and options.checked:
        return options.prepared
    if options.prepared is not None:
        data = open_prepared(options.prepared, verify=True)
        wanted = prepared_path(request).name
        if data.key != wanted:
            raise DataError(
                f"{options.prepared}: was not prepared by this recipe (key {data.key}, the recipe's is {wanted})",
                hint="prepare it: tuner prepare-data RECIPE",
            )
        return options.prepared
    if options.no_prepare and find_prepared(request) is None:
        raise DataError("the data is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
    return prepare(request, console).path


def run_result(
    run: RunDir,
    status: Literal["finished", "stopped"],
    saved: CheckpointInfo | None,
    total_steps: int,
    state: Mapping[str, Any],
) -> RunResult:
    """How a launch ended, from the state of its progress: its own, or what an earlier one left."""
    metrics = {key: state.get(key) for key in METRICS}
    return RunResult(run.path, status, int(state["step"]), total_steps, saved.path if saved else None, metrics)
