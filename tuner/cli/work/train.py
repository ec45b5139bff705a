"""What `tuner train` and `tuner resume` do, and what they say of how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from tuner.cli.command import Outcome, console_of, level_of, stopped_as
from tuner.config.load import LoadedRecipe, Override
from tuner.errors import counted
from tuner.run.changes import parse_reset
from tuner.run.options import LaunchOptions, Resume, RunResult
from tuner.run.status import launches_of, nothing_to_do, resumable_result, resume_source, status_of
from tuner.run.stored import in_store
from tuner.rundir.checkpoints import APART
from tuner.rundir.directory import warn_of_changed_file
from tuner.rundir.layout import export_dir
from tuner.runtime import startup
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import MANIFEST_NAME, read_json, typed_path
from tuner.stages import shown, url_of

LOADING = "loading libraries"


class AskedOptions(TypedDict, total=False):
    """Of :class:`~tuner.run.options.LaunchOptions`, what the commands have options for."""

    resume: Resume
    prepared: Path | None
    no_prepare: bool
    dry_run: bool
    on: Literal["here", "ray"]


def train_recipe(
    loaded: LoadedRecipe, verbose: bool, reset: str | None, **options: Unpack[AskedOptions]
) -> Outcome:
    """Train the recipe with these options. Raises RecipeError for a part of the run that cannot be reset."""
    return launch_training(loaded, LaunchOptions(reset=parse_reset(reset), **options), verbose)


def resume_training(
    run: Path, overrides: Sequence[Override], console: Console, verbose: bool, reset: str | None,
    **options: Unpack[AskedOptions],
) -> Outcome:
    """Train on with the recipe that a run keeps; it is said where its file is another one by now."""
    loaded = resume_source(run, overrides)
    warn_of_changed_file(run, console.warn)
    return train_recipe(loaded, verbose, reset, **options)


def launch_training(loaded: LoadedRecipe, options: LaunchOptions, verbose: bool) -> Outcome:
    """Train in this process, as one of those that torchrun or srun started, or in local ones; say how it ended.

    A signal before the first step stops a run that has a checkpoint as one after it does: with 75, to be resumed there.
    """
    level = level_of(loaded, verbose)
    console, options = console_of(level), replace(options, level=level)
    with in_store(loaded, console, writes=not options.dry_run):
        return _launched(loaded, options, console)


def _launched(loaded: LoadedRecipe, options: LaunchOptions, console: Console) -> Outcome:
    run_dir = Path(loaded.recipe.output_dir)
    before = len(launches_of(run_dir)) if options.resume == "never" else -1

    def left() -> tuple[str, Outcome] | None:
        found = resumable_result(run_dir, before)
        return None if found is None else stopped_outcome(found)

    with stopped_as(left):
        try:
            with startup.phase("data"), console.doing("checking the run directory"):
                status = status_of(loaded, options, console, hashes=RankInfo.from_environment().is_main)
            if (finished := nothing_to_do(status, loaded.recipe.export)) is not None:
                return outcome_of(finished, console)
            with startup.phase(startup.LIBRARIES), console.doing(LOADING):
                from tuner.run.launch import launch

            result = launch(loaded, options, status=status)
        except KeyboardInterrupt:  # raised in order: by ranks that were cut short, or by what looks for a signal
            found = resumable_result(run_dir, before)
            if found is None:
                raise
            result = found
    export = export_dir(result.run_dir, result.step) if loaded.recipe.export.at_end else None
    return outcome_of(result, console, export)


def outcome_of(result: RunResult, console: Console, export: Path | None = None) -> Outcome:
    """The command's outcome for a launch that ended in order; ``export`` is what a finished run was exported to."""
    run_dir = typed_path(result.run_dir)
    artifacts = _artifacts(result)
    metrics = {**result.metrics, "total_steps": result.total_steps}
    if result.status == "planned":
        return Outcome(shown(result.run_dir), artifacts=artifacts, metrics=metrics, next=f"tuner train, into {run_dir}")
    if result.status == "stopped":
        said, outcome = stopped_outcome(result)
        console.say("stopped", said)
        return outcome
    better = _better(result)
    following = f"tuner export-hf {run_dir}{' --step best' if better else ''}{_kept_apart(result)}"
    if result.checkpoint is None:
        following = f"tuner runs show {run_dir}"
    if export is not None:
        artifacts["export"], following = shown(export), f"tuner generate {typed_path(export)}"
    console.say("done", f"{counted(result.step, 'step')}{_evaluated(result.metrics)}{better} · next: {following}")
    return Outcome(shown(result.run_dir), artifacts=artifacts, metrics=metrics, next=following)


def stopped_outcome(result: RunResult) -> tuple[str, Outcome]:
    """What to say of a run that stopped and can be resumed, and the command's outcome. It imports nothing."""
    resume = f"tuner resume {typed_path(result.run_dir)}"
    artifacts = _artifacts(result)
    metrics = {**result.metrics, "total_steps": result.total_steps}
    outcome = Outcome(shown(result.run_dir), "stopped", 75, artifacts=artifacts, metrics=metrics, next=resume)
    return f"step {result.step} of {result.total_steps} · resume with: {resume}", outcome


def _artifacts(result: RunResult) -> dict[str, Any]:
    """The checkpoint; of a run in a store the place on this machine, too."""
    stage = {} if url_of(result.run_dir) is None else {"stage": str(result.run_dir)}
    return stage | ({"checkpoint": shown(result.checkpoint)} if result.checkpoint else {})


def _evaluated(metrics: Mapping[str, Any]) -> str:
    """The newest evaluation's loss, after that of the first one where there was an earlier one."""
    before, after = metrics.get("first_eval_loss"), metrics.get("eval_loss")
    first, last = metrics.get("first_eval_step"), metrics.get("eval_step")
    if after is None:
        return ""
    earlier = before is not None and first is not None and last is not None and first < last
    return f" · eval loss {before:.3f} -> {after:.3f}" if earlier else f" · eval loss {after:.3f}"


def _kept_apart(result: RunResult) -> str:
    """The option that an export needs where the adapter cannot be merged; else nothing."""
    manifest = None if result.checkpoint is None else result.checkpoint / MANIFEST_NAME
    if manifest is None or not manifest.is_file():
        return ""
    return " --adapter keep" if read_json(manifest).get("meta", {}).get(APART) else ""


def _better(result: RunResult) -> str:
    """The best evaluation where it is an earlier step's, whose checkpoint the recipe kept; else nothing."""
    best = result.metrics.get("best")
    if not best or best["step"] == result.step:
        return ""
    name = str(best["metric"]).removeprefix("eval/")
    named = "" if name == "loss" else f"{name} "
    return f" · best {named}{best['value']:.3f} at step {best['step']}"
