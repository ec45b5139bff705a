"""`tuner train` and `tuner resume`: train the recipe's model, and resume a stopped run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from tuner.cli.command import Flags, Outcome, command, console_of, input_path, level_of, load_for_command, overrides_in
from tuner.cli.named import run_path, stage_path
from tuner.errors import RecipeError
from tuner.runtime import startup

if TYPE_CHECKING:
    from tuner.run.options import Resume


LOADING = "loading libraries"
WORDS = ("auto", "must", "never")
Place = Literal["here", "ray"]


@command("train")
def train(  # noqa: PLR0913 - one parameter per option of the command
    flags: Flags, recipe: str | None = None, resume: str = "never", reset: str | None = None,
    prepared: str | None = None, overrides: str | None = None, no_prepare: bool = False, dry_run: bool = False,
    on: Place = "here", verbose: bool = False,
) -> Outcome:
    """Train the recipe's model into its run directory; prepares the data where that is not done."""
    mode = _resume_mode(resume)
    if [overrides, prepared, recipe].count("-") > 1:
        raise RecipeError("stdin is read once: only one of recipe, --prepared and --overrides can be -")
    loaded = load_for_command(recipe, [*overrides_in(overrides, flags), *flags], fetches=True)
    startup.begin(with_process=True)
    with startup.phase(startup.LIBRARIES), console_of(level_of(loaded, verbose)).doing(LOADING, at_once=True):
        from tuner.cli.work import train as work

    data = None if prepared is None else input_path(prepared)
    return work.train_recipe(
        loaded, verbose, reset, resume=mode, prepared=data, no_prepare=no_prepare, dry_run=dry_run, on=on
    )


def _resume_mode(text: str) -> Resume:
    if text in WORDS:
        return cast("Resume", text)
    path = stage_path(text)
    if not path.is_dir():
        raise RecipeError(
            f"--resume {text}: not one of {', '.join(WORDS)}, and there is no such directory",
            hint="give the path of a checkpoint, or of a run, to start a new run from it",
        )
    return path


@command("resume")
def resume(
    flags: Flags, run: str, reset: str | None = None, dry_run: bool = False, on: Place = "here", verbose: bool = False,
) -> Outcome:
    """Resume a stopped or killed run from its newest valid checkpoint; a finished, whole one is left as it is.

    It resumes with the recipe that the run keeps, whatever became of the file; keys that may change are flags.
    """
    path = run_path(run, extent="all")
    console = console_of("info")
    with console.doing(LOADING, at_once=True):
        from tuner.cli.work import train as work

    return work.resume_training(path, flags, console, verbose, reset, resume="must", dry_run=dry_run, on=on)
