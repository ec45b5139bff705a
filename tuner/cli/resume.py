"""`tuner resume`: resume a stopped run."""

from typing import Annotated

import typer

from tuner.cli.command import Outcome, VerboseOption, command, console_of, overrides_of
from tuner.cli.named import RunArgument, run_path
from tuner.cli.train import LOADING, OnOption, ResetOption


@command("resume")
def resume(
    ctx: typer.Context,
    run: RunArgument,
    reset: ResetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is trained.")] = False,
    on: OnOption = "here",
    verbose: VerboseOption = False,
) -> Outcome:
    """Resume a stopped or killed run from its newest valid checkpoint; a finished, whole one is left as it is.

    It resumes with the recipe that the run keeps, whatever became of the file; keys that may change are flags.
    """
    path = run_path(run, extent="all")
    console = console_of("info")
    with console.doing(LOADING, at_once=True):
        from tuner.cli.work import train as work

    options = work.options_of("must", None, False, dry_run, reset, on)
    return work.resume_training(path, overrides_of(ctx), options, console, verbose)
