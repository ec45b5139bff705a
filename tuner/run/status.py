"""What a run directory is to a launch: new, with steps left, or finished; another run's is refused.

Asked before torch is loaded, by the command or by each rank: a run with nothing left to train is reported without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.checkpoint.manifest import SEAL, step_dirs, step_name
from tuner.checkpoint.open import CheckpointInfo, newest, open_checkpoint
from tuner.config.ladder import require_one_run
from tuner.config.load import LoadedRecipe, Override, load_recipe, recipe_dict
from tuner.config.recipe import ExportSection, Recipe
from tuner.errors import DataError, MachineError, RecipeError, TunerError, counted
from tuner.run import changes
from tuner.run.options import LaunchOptions, RunResult
from tuner.rundir.checkpoints import last_step, way_to_whole
from tuner.rundir.directory import RunDir, another, origin
from tuner.rundir.model_path import find_checkpoint
from tuner.rundir.run_json import hold
from tuner.runtime.console import Console
from tuner.setup.settled import with_batch_of
from tuner.stages import local_path, shown
from tuner.train.progress import METRICS

if TYPE_CHECKING:
    from tuner.runtime.process import Collective


END_AT = "end_at"
"""Of a checkpoint's state: the step at which `train.end_at` ended the run, or was to end it."""


@dataclass(frozen=True)
class RunStatus:
    """A run directory as a launch finds it: `record` is None where no run exists yet, `finished` set where no step is
    left."""

    run: RunDir
    record: dict[str, Any] | None
    checkpoint: CheckpointInfo | None
    """The newest valid one; of a new run the checkpoint of another run that it branches from."""
    resets: tuple[changes.Reset, ...]
    """Every reset in the run's history; those at the checkpoint's step are applied by this launch."""
    finished: RunResult | None = None
    """The result, where no step is left."""


def status_of(loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool = True) -> RunStatus:
    """What the recipe's run directory is to a launch with these options, and what changed since, on the console.

    Every byte of the checkpoint is checked; without ``hashes``, where another process does that, tensors are not read,
    unless no step is left. Raises RecipeError for another recipe's run and where the options ask for another, DataError
    where no checkpoint is valid.
    """
    require_one_run(loaded.recipe.ladder)
    run = RunDir(Path(loaded.recipe.output_dir))
    record = run.read_record()
    if options.reset and options.resume == "never":
        raise RecipeError("--reset needs a run to resume", hint="add --resume auto, must or a PATH")
    if record is None:
        checkpoint = _branch_point(run, loaded, options, console, hashes)
        return RunStatus(run, None, checkpoint, changes.resets_for(None, checkpoint, options.reset))
    _require_same_branch(run, record, options)
    _require_same_recipe(run, record, loaded, options, console)
    checkpoint = _own_checkpoint(run, record, loaded, options, console, hashes)
    resets = changes.resets_for(record, checkpoint, options.reset)
    if options.reset or not _is_finished(record, checkpoint, loaded.recipe):
        return RunStatus(run, record, checkpoint, resets)
    steps = int(record["launches"][-1].get("step") or (checkpoint.step if checkpoint is not None else 0))
    _say_finished(run, record, loaded, steps, console)
    state = record.get("metrics") or ({"step": steps} if checkpoint is None else checkpoint.state)
    if not options.dry_run:
        _close(run, record, checkpoint)
    return RunStatus(run, record, checkpoint, resets, run_result(run, "finished", checkpoint, steps, state))


def agreed_status(status: RunStatus, ranks: Collective) -> RunStatus:
    """What rank 0 found, which alone hashed the tensors, on every rank. Collective.

    Raises DataError on all where one reads no manifest, or another one, at the checkpoint's path.
    """
    # Of what lies in a store each machine may have its stage elsewhere.
    agreed, at = ranks.on_rank0(lambda: (status, shown(status.checkpoint.path) if status.checkpoint else ""))
    checkpoint = agreed.checkpoint and replace(agreed.checkpoint, path=local_path(at, in_store=True))

    def read() -> None:
        if checkpoint and open_checkpoint(checkpoint.path, verify=False).manifest[SEAL] != checkpoint.manifest[SEAL]:
            said = f"{checkpoint.path}: another manifest than rank 0 reads there"
            raise DataError(said, hint="all processes must see one file system")

    ranks.together(read)
    return replace(agreed, run=status.run, checkpoint=checkpoint)


def nothing_to_do(status: RunStatus, section: ExportSection) -> RunResult | None:
    """The result of a run of which nothing is left to train and nothing is to be exported; None of any other."""
    return None if section.every is not None or section.at_end else status.finished


def _branch_point(
    run: RunDir, loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool
) -> CheckpointInfo | None:
    """The checkpoint that a new run begins from, at the path that the user gave: a damaged one is fatal."""
    if options.resume == "must":
        raise RecipeError(f"{run.path} holds no run to resume", hint="leave out --resume must")
    path = options.resume
    if not isinstance(path, Path):
        return None
    if not path.is_dir():
        raise RecipeError(f"--resume {path}: no such directory", hint="give a checkpoint, auto, must or never")
    chosen = find_checkpoint(path, console.warn, shards=hashes)
    checkpoint = open_checkpoint(path, shards=hashes) if chosen is None else chosen.checkpoint
    _say_changed(require_recipe_of(checkpoint, recipe_dict(loaded.recipe), options.reset), console)
    return checkpoint


def _require_same_branch(run: RunDir, record: Mapping[str, Any], options: LaunchOptions) -> None:
    """Raise RecipeError where a launch from a given checkpoint meets a run that did not begin there."""
    branched = branch_source(record)
    if isinstance(options.resume, Path) and (
        branched is None or options.resume not in (branched, branched.parent.parent)
    ):
        raise RecipeError(
            f"{shown(run.path)} holds a run that did not begin from {options.resume}",
            hint=f"resume it: tuner resume {run.path}      start another run: --name NEW-NAME",
        )


def _require_same_recipe(
    run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, options: LaunchOptions, console: Console
) -> None:
    """Say what differs from the recipe of the run. Raises RecipeError where that makes it another run."""
    if (before := run.recipe(record)) is None:
        return
    recipe = with_batch_of(record, loaded).recipe
    kinds = (changes.optimizer_kind(each.optimizer) for each in (before.recipe, recipe))
    allowed = changes.allowed_changes(options.reset, *kinds)
    changed = changes.changes(recipe_dict(before.recipe), recipe_dict(recipe), allowed)
    if changed.refuse:
        raise _another_recipe(run, record, loaded, options, changed)
    if options.resume != "never":
        _say_changed(changed, console)


def _say_finished(run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, steps: int, console: Console) -> None:
    """Say that a run is trained already, and warn where its data were modified after its last launch began."""
    started = record["launches"][-1].get("started")  # not in a record that was made again from the checkpoints
    if started is not None and (changed := changes.modified_since(loaded.recipe.data, started)):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        console.warn(
            f"{', '.join(changed[:3])}{more}: modified after this run started; what changed since is not trained on. "
            f"To train on it: {_new_run(run, record, loaded)}"
        )
    console.say("finished", f"{run.path} is already trained: {counted(steps, 'step')}")


def _another_recipe(
    run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe, options: LaunchOptions, changed: changes.Changes
) -> RecipeError:
    """The error of a recipe that is another run's, with the way to change it in this run, and to start another."""
    resets, ways = changed.resets(), []
    if resets is not None:
        resume = " --resume must" if options.resume == "never" else ""
        ways.append(f"change it in this run: add{resume} --reset {resets}")
    ways.append(f"start another run: {_new_run(run, record, loaded)}")
    said = f"{shown(run.path)} holds a run with another recipe ({changed.shown()}); it was not touched"
    return RecipeError(said, hint="      ".join(ways))


def _new_run(run: RunDir, record: Mapping[str, Any], loaded: LoadedRecipe) -> str:
    """What starts another run: a name for a recipe, the file or the run's copy for `tuner resume`, which takes none."""
    if loaded.path is None or not loaded.path.absolute().is_relative_to(run.path.absolute()):
        return "--name NEW-NAME" if loaded.path is None else another(loaded.path)
    file = origin(record)
    if file is not None and file.is_file():
        return f"tuner train {file} {another(file)}"
    return f"tuner train {run.resolved_recipe} --name NEW-NAME --output_dir {run.path.parent}/NEW-NAME"


def _own_checkpoint(
    run: RunDir, record: dict[str, Any], loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool
) -> CheckpointInfo | None:
    """The newest valid checkpoint of a run, or the one that it began from."""
    recipe = loaded.recipe
    found = newest(run.checkpoints, console.warn, shards=hashes)
    if found is not None and not hashes and _is_finished(record, found, recipe):
        found = newest(run.checkpoints, console.warn)  # finished or not is decided by the hashes, alike on every rank
    if found is None and step_dirs(run.checkpoints):
        raise DataError(
            f"{run.checkpoints}: none of its checkpoints is valid",
            hint=f"{way_to_whole(run.checkpoints, any_valid=False)}      start another run: --name NEW-NAME",
        )
    branched = branch_source(record)
    if found is None and branched is not None:
        found = open_checkpoint(branched, shards=hashes)  # it ended before it saved one of its own, or lost them
    if options.resume == "never" and not _is_finished(record, found, recipe) and not options.dry_run:
        at = f"at step {found.step}" if found is not None else "without a checkpoint"
        way = f"resume it: tuner resume {run.path}      start another run: --name NEW-NAME"
        if not run.keeps_recipe(record):
            way = "resume it with --resume must      start another run: --name NEW-NAME"
        raise RecipeError(f"{run.path} holds an unfinished run, {at}", hint=way)
    _warn_of_losses(run, record, found, console)
    return found


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


def launches_of(run_dir: Path) -> list[Mapping[str, Any]]:
    """The launches of a run as its record has them; none where it cannot be read."""
    with suppress(TunerError):
        return list((RunDir(run_dir).read_record() or {}).get("launches", ()))
    return []


def resumable_result(run_dir: Path, launches: int = -1) -> RunResult | None:
    """What a run can be resumed from where a launch was cut short, by its newest checkpoint; None without any.

    With `launches`, those that it had before, also None where none was added: the command would not resume it. It
    needs no torch, and is called in a signal handler: it imports nothing.
    """
    run = RunDir(run_dir)
    record = run.read_record()
    if record is None or len(record["launches"]) <= launches:
        return None
    total = record["launches"][-1].get("total_steps")
    saved = None if total is None else newest(run.checkpoints, verify=False)
    return None if saved is None else run_result(run, "stopped", saved, int(total), saved.state)


def run_result(
    run: RunDir, status: Literal["finished", "stopped"], saved: CheckpointInfo | None, total_steps: int,
    state: Mapping[str, Any],
) -> RunResult:
    """How a launch ended, from the state of its progress: its own, or what an earlier one left."""
    metrics = {key: state.get(key) for key in METRICS}
    return RunResult(run.path, status, int(state["step"]), total_steps, saved.path if saved else None, metrics)


def outcome(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the record says of a whole run by its last state: the best evaluation and, once it is finished, metrics."""
    metrics = {"metrics": {key: state[key] for key in METRICS}} if state["finished"] else {}
    return {"best": state["best"]} | metrics


def branch_source(record: Mapping[str, Any]) -> Path | None:
    """The checkpoint of another run that a run's first launch resumed from, if it did."""
    path = record["launches"][0].get("began_from") if record["launches"] else None
    return None if path is None else local_path(path, in_store=True)


def require_recipe_of(found: CheckpointInfo, recipe: Mapping[str, Any], reset: Collection[str]) -> changes.Changes:
    """What differs from the recipe that a checkpoint was saved with. Raises RecipeError where it is another run's."""
    before = recipe_dict(load_recipe(found.meta["recipe"]).recipe)  # a key that is newer than it has its default
    allowed = changes.allowed_changes(reset, before["optimizer"]["kind"], recipe["optimizer"]["kind"])
    changed = changes.changes(before, recipe, allowed)
    if changed.refuse:
        said = f"{shown(found.path)} was saved with another recipe ({changed.shown()})"
        raise RecipeError(said, hint=_way_from(changed))
    return changed


def require_same_choices(
    status: RunStatus, written: Recipe, resolved: Recipe, options: LaunchOptions, console: Console
) -> None:
    """A launch on another machine must not resolve an `auto` into another run; warn where only bits differ.

    Takes the recipe as it is written, and as this machine resolves it. Raises RecipeError.
    """
    before = None if status.record is None else status.run.recipe(status.record)
    if before is None:
        if status.checkpoint is not None:
            require_recipe_of(status.checkpoint, recipe_dict(resolved), options.reset)
        return
    resolved = resolved.model_copy(update={"parallel": written.parallel})  # of which a run keeps what was written, too
    kinds = (changes.optimizer_kind(each.optimizer) for each in (before.recipe, resolved))
    allowed, had = changes.allowed_changes(options.reset, *kinds), recipe_dict(before.recipe)
    changed, known = (changes.changes(had, recipe_dict(recipe), allowed) for recipe in (resolved, written))
    if changed.refuse:
        said = f"{shown(status.run.path)}: this machine resolves the recipe differently ({changed.shown()})"
        raise RecipeError(said, hint=f"keep the run's choices: tuner resume {status.run.path}")
    warn_of_changes([line for line in changed.warn if line not in known.warn], console)


def _way_from(changed: changes.Changes) -> str:
    """The way on where a checkpoint's recipe is another one: a reset, or its own values."""
    values = "take the values of its run, which recipe.resolved.yaml there holds"
    resets = changed.resets()
    return values if resets is None else f"add --reset {resets}, or {values}"


def warn_of_changes(changed: Sequence[str], console: Console) -> None:
    """Warn of each changed key after which a run is resumed less exactly."""
    for line in changed:
        console.warn(f"{line}: results are no longer bit-identical, or losses no longer comparable, from here on")


def _say_changed(changed: changes.Changes, console: Console) -> None:
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


def _is_finished(record: Mapping[str, Any], found: CheckpointInfo | None, recipe: Recipe) -> bool:
    """Whether nothing is left to train: by a final checkpoint, or by the record where what it kept is there.

    A launch may have been killed before it could write down that it finished; a run that was reset after that
    checkpoint has steps left. So has a finished run whose last checkpoint is damaged or gone: `found` is the newest
    that is valid. With `checkpoint.at_end` that is the one of the last step. One that `train.end_at` ended continues
    where that is later now, or taken away.
    """
    ended, at_end = None if found is None else found.state.get(END_AT), recipe.checkpoint.at_end
    if ended is not None and (recipe.train.end_at is None or recipe.train.end_at > ended):
        return False
    if found is not None and found.state.get("finished") and not changes.pending(changes.resets_of(record), found.step):
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
    with suppress(MachineError), hold(run.path):
        run.sweep()
        if record["status"] != "finished" and found is not None and run.read_record() == record:
            run.close(record | outcome(found.state), found.step)
