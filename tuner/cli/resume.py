"""`tuner resume`: resume a stopped run."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.command import Outcome, VerboseOption, command, overrides_of
from tuner.cli.named import RunArgument, run_path
from tuner.cli.train import LOADING, ResetOption, launch_training
from tuner.runtime.dist import RankInfo


@command("resume")
def resume(
    ctx: typer.Context,
    run: RunArgument,
    reset: ResetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is trained.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Resume a stopped or killed run from its newest valid checkpoint; a finished, whole one is left as it is.

    It resumes with the recipe that the run keeps, whatever became of the file; keys that may change are flags.
    """
    path = run_path(run)
    from tuner.runtime.console import Console

    console = Console(RankInfo.from_environment().is_main)
    with console.doing(LOADING, at_once=True):
        from tuner.run.changes import parse_reset
        from tuner.run.options import LaunchOptions
        from tuner.run.status import resume_source
        from tuner.rundir.origin import warn_of_changed_file

    options = LaunchOptions("must", dry_run=dry_run, reset=parse_reset(reset))
    loaded = resume_source(path, overrides_of(ctx))
    warn_of_changed_file(path, console.warn)
    return launch_training(loaded, options, verbose)
