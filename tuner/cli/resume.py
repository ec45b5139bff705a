"""`tuner resume`: go on with a stopped run."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.session import (
    DebugOption,
    JsonOption,
    Outcome,
    OutputOptions,
    VerboseOption,
    input_path,
    run_command,
)
from tuner.cli.train import launch_training


def resume(
    run_dir: Annotated[str, typer.Argument(help="Run directory that tuner train printed; - reads it from stdin.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is trained.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Go on with a stopped or killed run from its newest valid checkpoint; a finished run is left as it is."""

    def body() -> Outcome:
        path = input_path(run_dir)
        from tuner.train.ready import TrainOptions, resume_source

        return launch_training(resume_source(path), TrainOptions(resume="must", dry_run=dry_run), verbose)

    run_command("resume", OutputOptions(json, verbose, debug), body)
