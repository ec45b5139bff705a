"""`tuner resume`: resume a stopped run."""

from tuner.cli.command import Flags, Outcome, command, console_of
from tuner.cli.named import run_path
from tuner.cli.train import LOADING, Place


@command("resume")
def resume(
    flags: Flags, run: str, reset: str | None = None, dry_run: bool = False, on: Place = "here",
    verbose: bool = False,
) -> Outcome:
    """Resume a stopped or killed run from its newest valid checkpoint; a finished, whole one is left as it is.

    It resumes with the recipe that the run keeps, whatever became of the file; keys that may change are flags.
    """
    path = run_path(run, extent="all")
    console = console_of("info")
    with console.doing(LOADING, at_once=True):
        from tuner.cli.work import train as work

    options = work.options_of("must", None, False, dry_run, reset, on)
    return work.resume_training(path, flags, options, console, verbose)
