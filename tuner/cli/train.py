"""`tuner train`: train the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tuner.cli.command import (
    Outcome,
    RecipeArgument,
    VerboseOption,
    command,
    given_overrides,
    input_path,
    load_for_command,
    overrides_of,
    stopped_as,
)
from tuner.errors import RecipeError, counted
from tuner.runtime import startup
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import MANIFEST_NAME, read_json

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.run.options import LaunchOptions, Resume, RunResult
    from tuner.runtime.console import Console, Level

LOADING = "loading libraries"
WORDS = ("auto", "must", "never")
ResetOption = Annotated[
    str | None,
    typer.Option(
        metavar="PART,...",
        help="What to reset: optimizer (or optimizer.state, optimizer.arguments), schedule, data, rng. Its keys in "
        "the recipe may change.",
    ),
]


@command("train")
def train(  # noqa: PLR0913 - one parameter per option of the command
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|must|never|PATH",
            help="auto resumes a run where it stopped, must requires one to resume, never refuses to touch one; the "
            "PATH of a checkpoint or run starts a new run from it.",
        ),
    ] = "never",
    reset: ResetOption = None,
    prepared: Annotated[str | None, typer.Option(help="Prepared data to use; - reads its path from stdin.")] = None,
    overrides: Annotated[
        str | None,
        typer.Option(help="Values of the recipe from what tuner profile --fit --json printed: a file, or - for stdin."),
    ] = None,
    no_prepare: Annotated[
        bool, typer.Option("--no-prepare", help="Fail (exit 3) where the data is not prepared yet.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop; data may be prepared, nothing is trained.")
    ] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Train the recipe's model into its run directory; prepares the data where that is not done."""
    mode = _resume_mode(resume)
    if [overrides, prepared, recipe].count("-") > 1:
        raise RecipeError("stdin is read once: only one of recipe, --prepared and --overrides can be -")
    typed = overrides_of(ctx)
    loaded = load_for_command(recipe, [*given_overrides(overrides, typed), *typed])
    startup.begin(with_process=True)
    with startup.phase(startup.LIBRARIES), _console(loaded, verbose).doing(LOADING, at_once=True):
        from tuner.run.changes import parse_reset
        from tuner.run.options import LaunchOptions

    data = None if prepared is None else input_path(prepared)
    options = LaunchOptions(mode, data, no_prepare, dry_run, parse_reset(reset))
    return launch_training(loaded, options, verbose)


def _resume_mode(text: str) -> Resume:
    if text in WORDS:
        return cast("Resume", text)
    path = input_path(text)
    if not path.is_dir():
        raise RecipeError(
            f"--resume {text}: not one of {', '.join(WORDS)}, and there is no such directory",
            hint="give the path of a checkpoint, or of a run, to start a new run from it",
        )
    return path


def launch_training(loaded: LoadedRecipe, options: LaunchOptions, verbose: bool) -> Outcome:
    """Train in this process, as one of those that torchrun or srun started, or in local ones; say how it ended.

    A signal before the first step stops a run that has a checkpoint as one after it does: with 75, to be resumed there.
    """
    from tuner.rundir.layout import export_dir

    console = _console(loaded, verbose)
    options = replace(options, level=_level(loaded, verbose))
    from tuner.run.status import launches_of, left_before, nothing_to_do, status_of

    run_dir = Path(loaded.recipe.output_dir)
    before = launches_of(run_dir) if options.resume == "never" else -1

    def left() -> tuple[str, Outcome] | None:
        found = left_before(run_dir, before)
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
            found = left_before(run_dir, before)
            if found is None:
                raise
            result = found
    export = export_dir(result.run_dir, result.step) if loaded.recipe.export.at_end else None
    return outcome_of(result, console, export)


def _level(loaded: LoadedRecipe, verbose: bool) -> Level:
    return "debug" if verbose else loaded.recipe.logging.level


def _console(loaded: LoadedRecipe, verbose: bool) -> Console:
    """What speaks for this command: rank 0 alone, as much as the recipe says."""
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    return Console(RankInfo.from_environment().is_main, _level(loaded, verbose))


def outcome_of(result: RunResult, console: Console, export: Path | None = None) -> Outcome:
    """The command's outcome for a launch that ended in order; ``export`` is what a finished run was exported to."""
    run_dir = _shown(result.run_dir)
    artifacts = {"checkpoint": str(result.checkpoint)} if result.checkpoint else {}
    metrics = {**result.metrics, "total_steps": result.total_steps}
    if result.status == "planned":
        return Outcome(str(result.run_dir), artifacts=artifacts, metrics=metrics, next=f"tuner train, into {run_dir}")
    if result.status == "stopped":
        said, outcome = stopped_outcome(result)
        console.say("stopped", said)
        return outcome
    better = _better(result)
    following = f"tuner export-hf {run_dir}{' --step best' if better else ''}{_kept_apart(result)}"
    if result.checkpoint is None:
        following = f"tuner runs show {run_dir}"
    if export is not None:
        artifacts["export"], following = str(export), f"tuner generate {_shown(export)}"
    console.say("done", f"{counted(result.step, 'step')}{_evaluated(result.metrics)}{better} · next: {following}")
    return Outcome(str(result.run_dir), artifacts=artifacts, metrics=metrics, next=following)


def stopped_outcome(result: RunResult) -> tuple[str, Outcome]:
    """What to say of a run that stopped and can be resumed, and the command's outcome. It imports nothing."""
    resume = f"tuner resume {_shown(result.run_dir)}"
    artifacts = {"checkpoint": str(result.checkpoint)} if result.checkpoint else {}
    metrics = {**result.metrics, "total_steps": result.total_steps}
    outcome = Outcome(str(result.run_dir), "stopped", 75, artifacts=artifacts, metrics=metrics, next=resume)
    return f"step {result.step} of {result.total_steps} · resume with: {resume}", outcome


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
    from tuner.rundir.exports import APART

    manifest = None if result.checkpoint is None else result.checkpoint / MANIFEST_NAME
    if manifest is None or not manifest.is_file():
        return ""
    return " --adapter keep" if read_json(manifest).get("meta", {}).get(APART) else ""


def _better(result: RunResult) -> str:
    """The best evaluation where it is an earlier step's, whose checkpoint the recipe kept; else nothing."""
    best = result.metrics.get("best")
    if not best or best["step"] == result.step:
        return ""
    from tuner.rundir.record import best_value

    name = str(best["metric"]).removeprefix("eval/")
    named = "" if name == "loss" else f"{name} "
    return f" · best {named}{best_value(best):.3f} at step {best['step']}"


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
