"""What earlier launches of a run left: the checkpoint to resume from, or the result of a run that is finished.

Importing it needs no torch: a run with nothing left to train is reported before that is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.checkpoint.manifest import INDEX_NAME, STATE_NAME, rank_files, read_manifest, step_dirs, step_name
from tuner.checkpoint.shard_hash import Chunk, verify_shard
from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.overrides import Override
from tuner.errors import DataError, MachineError, RecipeError, TunerError, counted
from tuner.run.changes import Changes, changes, freed_keys, modified_since, moments_of, pending, resets_of
from tuner.run.options import LaunchOptions, RunResult
from tuner.rundir.directory import RunDir
from tuner.rundir.last_checkpoint import last_step, way_to_whole
from tuner.rundir.origin import another, origin
from tuner.rundir.run_json import hold
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import read_json
from tuner.setup.settled import with_batch_of
from tuner.train.progress import METRICS

if TYPE_CHECKING:
    from tuner.checkpoint.load import CheckpointInfo


def find_checkpoint(
    run: RunDir,
    record: dict[str, Any] | None,
    loaded: LoadedRecipe,
    options: LaunchOptions,
    console: Console,
    hashes: bool,
) -> CheckpointInfo | None:
    """The checkpoint to resume from, after checking that the directory, the recipe and the options agree.

    Without `hashes` its tensors are not read. Raises RecipeError and DataError.
    """
    if record is None:
        if options.resume == "must":
            raise RecipeError(f"{run.path} holds no run to resume", hint="leave out --resume must")
        if isinstance(options.resume, Path):
            return _given_checkpoint(options.resume, loaded, options, console, hashes)
        return None
    branched = began(record)
    if isinstance(options.resume, Path) and (
        branched is None or options.resume not in (branched, branched.parent.parent)
    ):
        raise RecipeError(
            f"{run.path} holds a run that did not begin from {options.resume}",
            hint=f"resume it: tuner resume {run.path}      start another run: --name NEW-NAME",
        )
    _require_same_recipe(run, record, loaded, options, console)
    return _own_checkpoint(run, record, loaded, options, console, hashes)


def already_finished(loaded: LoadedRecipe, options: LaunchOptions, console: Console) -> RunResult | None:
    """The result of a run of which nothing is left to train, found without torch; None where more is to be looked at.

    Every byte of its last checkpoint is checked. Raises RecipeError for a run with another recipe.
    """
    recipe, run = loaded.recipe, RunDir(Path(loaded.recipe.output_dir))
    exports = recipe.export.every is not None or recipe.export.at_end
    if RankInfo.is_given() or isinstance(options.resume, Path) or exports or not run.record.is_file():
        return None
    record = run.read_record()
    if record is None:
        return None
    _require_same_recipe(run, record, loaded, options, Console(main=False))  # whoever resumes reports what may change
    state = record.get("metrics")
    if options.reset or record["status"] != "finished" or state is None or run.leftovers():
        return None
    step = last_step(run.checkpoints, record)
    path = None if step is None else run.checkpoints / step_name(step)
    if path is None or not _is_whole(path) or not _is_end(record, path, recipe.checkpoint.at_end):
        return None
    _require_same_recipe(run, record, loaded, options, console)
    steps = int(record["launches"][-1]["step"])
    _say_finished(run, record, loaded, steps, console)
    return RunResult(run.path, "finished", int(state["step"]), steps, path, {key: state.get(key) for key in METRICS})


def _is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint has its SHA-256, those of the tensors too."""
    try:
        manifest = read_manifest(path, verify=True)
        tensors = read_json(path / INDEX_NAME)["tensors"]
        chunks = [Chunk(**chunk) for entry in tensors.values() for chunk in entry["chunks"]]
        for name, entry in rank_files(manifest).items():
            verify_shard(path / name, entry["sha256"], [chunk for chunk in chunks if chunk.file == name])
    except (DataError, KeyError, TypeError, AttributeError):
        return False
    return True


def _is_end(record: Mapping[str, Any], path: Path, at_end: bool) -> bool:
    """Whether a finished run's last checkpoint is the one that it should have left."""
    last, state = record["launches"][-1], read_json(path / STATE_NAME)
    wanted = last.get("step") if at_end else last.get("saved_step")
    is_known = type(wanted) is int and type(last.get("step")) is int
    return is_known and state["step"] >= wanted and not pending(resets_of(record), state["step"])


def _require_same_recipe(
    run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, options: LaunchOptions, console: Console
) -> None:
    """Say what differs from the recipe of the run. Raises RecipeError where that makes it another run."""
    before = run.recipe(record)
    if before is None:
        return
    recipe = with_batch_of(record, loaded).recipe
    freed = freed_keys(options.reset, moments_of(before.recipe.optimizer), moments_of(recipe.optimizer))
    changed = changes(recipe_dict(before.recipe), recipe_dict(recipe), freed)
    if changed.refuse:
        raise _another_recipe(run, record, loaded, options, changed)
    if options.resume != "never":
        _say_changed(changed, console)


def _say_finished(run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, steps: int, console: Console) -> None:
    """Say that a run is trained already, and warn where its data were modified after its last launch began."""
    started = record["launches"][-1].get("started")  # not in a record that was made again from the checkpoints
    if started is not None and (changed := modified_since(loaded.recipe.data, started)):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        console.warn(
            f"{', '.join(changed[:3])}{more}: modified after this run started; what changed since is not trained on. "
            f"To train on it: {_new_run(run, record, loaded)}"
        )
    console.say("finished", f"{run.path} is already trained: {counted(steps, 'step')}")


def _another_recipe(
    run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, options: LaunchOptions, changed: Changes
) -> RecipeError:
    """The error of a recipe that is another run's, with the way to change it in this run, and to start another."""
    resets, ways = changed.resets(), []
    if resets is not None:
        resume = " --resume must" if options.resume == "never" else ""
        ways.append(f"change it in this run: add{resume} --reset {resets}")
    ways.append(f"start another run: {_new_run(run, record, loaded)}")
    return RecipeError(
        f"{run.path} holds a run with another recipe ({changed.shown()}); it was not touched", hint="      ".join(ways)
    )


def _new_run(run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe) -> str:
    """What starts another run: a name for a recipe, the file or the run's copy for `tuner resume`, which takes none."""
    if loaded.path is None or not loaded.path.absolute().is_relative_to(run.path.absolute()):
        return "--name NEW-NAME" if loaded.path is None else another(loaded.path)
    file = origin(record)
    if file is not None and file.is_file():
        return f"tuner train {file} {another(file)}"
    return f"tuner train {run.resolved_recipe} --name NEW-NAME --output_dir {run.path.parent}/NEW-NAME"


def _own_checkpoint(
    run: RunDir,
    record: dict[str, Any],
    loaded: LoadedRecipe,
    options: LaunchOptions,
    console: Console,
    hashes: bool,
) -> CheckpointInfo | None:
    """The newest valid checkpoint of a run, or the one that it began from."""
    from tuner.checkpoint.load import newest, open_checkpoint

    at_end = loaded.recipe.checkpoint.at_end
    found = newest(run.checkpoints, console.warn, shards=hashes)
    if found is not None and not hashes and _is_finished(record, found, at_end):
        found = newest(run.checkpoints, console.warn)  # every rank must say the same of it
    if found is None and step_dirs(run.checkpoints):
        raise DataError(
            f"{run.checkpoints}: none of its checkpoints is valid",
            hint=f"{way_to_whole(run.checkpoints, any_valid=False)}      start another run: --name NEW-NAME",
        )
    branched = began(record)
    if found is None and branched is not None:
        found = open_checkpoint(branched, shards=hashes)  # it ended before it saved one of its own, or lost them
    if options.resume == "never" and not _is_finished(record, found, at_end) and not options.dry_run:
        at = f"at step {found.step}" if found is not None else "without a checkpoint"
        way = f"resume it: tuner resume {run.path}      start another run: --name NEW-NAME"
        if not run.keeps_recipe(record):
            way = "resume it with --resume must      start another run: --name NEW-NAME"
        raise RecipeError(f"{run.path} holds an unfinished run, {at}", hint=way)
    _warn_of_losses(run, record, found, console)
    return found


def finished_result(
    run: RunDir,
    record: dict[str, Any],
    found: CheckpointInfo | None,
    loaded: LoadedRecipe,
    options: LaunchOptions,
    console: Console,
) -> RunResult | None:
    """The result of a run of which nothing is left to train; None of any other."""
    if not _is_finished(record, found, loaded.recipe.checkpoint.at_end):
        return None
    step = int(record["launches"][-1].get("step") or (found.step if found is not None else 0))
    _say_finished(run, record, loaded, step, console)
    state = record.get("metrics") or ({"step": step} if found is None else found.state)
    if not options.dry_run:
        _close(run, record, found)
    return run_result(run, "finished", found, step, state)


def resume_source(run_dir: Path, overrides: Sequence[Override] = ()) -> LoadedRecipe:
    """The recipe that a run directory is resumed with. Raises RecipeError for a directory that holds no run."""
    run = RunDir(run_dir.absolute())
    if not run.path.is_dir():
        raise RecipeError(f"{run_dir}: no such directory", hint="give the run directory that tuner train printed")
    record = run.read_record()
    loaded = None if record is None else run.recipe(record)
    if loaded is None:
        hint = "start it with tuner train" if record is None else "name its recipe: tuner train RECIPE --resume must"
        raise RecipeError(f"{run_dir} holds no run that could be resumed", hint=hint)
    if overrides:
        loaded = replace(load_recipe(recipe_dict(loaded.recipe), overrides), path=loaded.path, text=loaded.text)
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"output_dir": str(run.path)}))


def launches_of(run_dir: Path) -> int:
    """How many launches a run has had; none where its record cannot be read."""
    with suppress(TunerError):
        record = RunDir(run_dir).read_record()
        return 0 if record is None else len(record["launches"])
    return 0


def left_before(run_dir: Path, launches: int = -1) -> RunResult | None:
    """What a run can be resumed from where a launch was cut short, by its newest checkpoint; None without any.

    With `launches`, those that it had before, also None where none was added: the command would not resume it. It
    needs no torch, and is called in a signal handler: it imports nothing.
    """
    run = RunDir(run_dir)
    record = run.read_record()
    if record is None or len(record["launches"]) <= launches:
        return None
    total = record["launches"][-1].get("total_steps")
    for _, path in [] if total is None else step_dirs(run.checkpoints):
        with suppress(DataError):
            read_manifest(path, verify=False)
            state = read_json(path / STATE_NAME)
            metrics = {key: state.get(key) for key in METRICS}
            return RunResult(run.path, "stopped", int(state["step"]), int(total), path, metrics)
    return None


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


def began(record: Mapping[str, Any]) -> Path | None:
    """The checkpoint of another run that a run's first launch resumed from, if it did."""
    path = record["launches"][0].get("began_from") if record["launches"] else None
    return None if path is None else Path(path)


def require_recipe_of(found: CheckpointInfo, recipe: Mapping[str, Any], reset: Collection[str]) -> Changes:
    """What differs from the recipe that a checkpoint was saved with. Raises RecipeError where it is another run's."""
    before = recipe_dict(load_recipe(found.meta["recipe"]).recipe)  # a key that is newer than it has its default
    changed = changes(before, recipe, freed_keys(reset, before["optimizer"]["kind"], recipe["optimizer"]["kind"]))
    if changed.refuse:
        raise RecipeError(
            f"{found.path} was saved with another recipe ({changed.shown()})",
            hint=_way_from(changed),
        )
    return changed


def _way_from(changed: Changes) -> str:
    """The way on where a checkpoint's recipe is another one: a reset, or its own values."""
    values = "take the values of its run, which recipe.resolved.yaml there holds"
    resets = changed.resets()
    return values if resets is None else f"add --reset {resets}, or {values}"


def warn_of_changes(changed: Sequence[str], console: Console) -> None:
    """Warn of each changed key after which a run is resumed less exactly."""
    for line in changed:
        console.warn(f"{line}: results are no longer bit-identical, or losses no longer comparable, from here on")


def _say_changed(changed: Changes, console: Console) -> None:
    """Print what differs from the recipe of the run that is resumed."""
    if changed.safe:
        console.say("changed", "\n".join(changed.safe))
    warn_of_changes(changed.warn, console)


def _warn_of_losses(run: RunDir, record: Mapping[str, Any], found: CheckpointInfo | None, console: Console) -> None:
    """Warn of what is gone from a run, and from which step it is made again."""
    at = 0 if found is None else found.step
    if not run.record.is_file():
        console.warn(f"{run.record} is gone: it is written again, from step {at}")
    last = last_step(run.checkpoints, record)
    if last is not None and last > at and not (run.checkpoints / step_name(last)).is_dir():
        console.warn(f"{run.checkpoints / step_name(last)}, the last checkpoint, is gone: trained again from step {at}")


def _given_checkpoint(
    path: Path, loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool
) -> CheckpointInfo:
    """The checkpoint at a path that the user gave, of a run its last one: a damaged one is fatal."""
    if not path.is_dir():
        raise RecipeError(f"--resume {path}: no such directory", hint="give a checkpoint, auto, must or never")
    from tuner.checkpoint.load import open_checkpoint
    from tuner.rundir.model_path import find_checkpoint as find_run_checkpoint

    chosen = find_run_checkpoint(path, console.warn, shards=hashes)
    found = open_checkpoint(path, shards=hashes) if chosen is None else chosen.checkpoint
    _say_changed(require_recipe_of(found, recipe_dict(loaded.recipe), options.reset), console)
    return found


def _is_finished(record: Mapping[str, Any], found: CheckpointInfo | None, at_end: bool) -> bool:
    """Whether nothing is left to train: by a final checkpoint, or by the record where what it kept is there.

    A launch may have been killed before it could write down that it finished; a run that was reset after that
    checkpoint has steps left. So has a finished run whose last checkpoint is damaged or gone: `found` is the newest
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
    """Do what a launch that was killed after its last save left undone, unless another process holds the run."""
    if record["status"] == "finished" and not run.leftovers():
        return
    from tuner.run.state import outcome

    with suppress(MachineError), hold(run.path):
        run.sweep()
        if record["status"] != "finished" and found is not None and run.read_record() == record:
            run.close(record | outcome(found.state), found.step)
