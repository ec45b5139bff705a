"""`tuner resume`: resume a stopped run."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.command import Outcome, VerboseOption, command, input_path, overrides_of
from tuner.cli.train import ResetOption, launch_training


@command("resume")
def resume(  # noqa: PLR0913 - one parameter per option of the command
    ctx: typer.Context,
    run_dir: Annotated[str, typer.Argument(help="Run directory that tuner train printed; - reads it from stdin.")],
    reset: ResetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is trained.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Resume a stopped or killed run from its newest valid checkpoint; a finished, whole one is left as it is.

    Keys of the recipe that may change are given as --section.key value.
    """
    path = input_path(run_dir)
    from tuner.run.changes import parse_reset
    from tuner.run.options import LaunchOptions
    from tuner.run.previous import resume_source

    options = LaunchOptions("must", dry_run=dry_run, reset=parse_reset(reset))
    return launch_training(resume_source(path, overrides_of(ctx)), options, verbose)
