"""`tuner profile`: what a run needs and costs, predicted for any device, or measured on a few of its own steps."""

from pathlib import Path

from tuner.cli.command import Console, Flags, Outcome, command, load_one_run
from tuner.errors import RecipeError


@command("profile")
def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    flags: Flags, console: Console, recipe: str | None = None, device: str | None = None, processes: str | None = None,
    memory: str | None = None, fit: str | None = None, host_memory: str | None = None, measure: int | None = None,
    output: Path | None = None, dry_run: bool = False, verbose: bool = False,
) -> Outcome:
    """Predict memory and time of a recipe, find what fits, or measure; no run directory is touched."""
    is_elsewhere = bool(fit is not None or device or processes or host_memory)
    if fit is not None and output is not None:
        raise RecipeError(
            "--fit cannot be combined with --output",
            hint="leave out --output, and write the page with the flags that --fit prints",
        )
    if fit and memory is not None:
        raise RecipeError("--fit SIZE cannot be combined with --memory", hint="--fit says how much memory there is")
    if (measure is not None or dry_run) and is_elsewhere:
        raise RecipeError(
            "--measure runs on this machine's device",
            hint="leave out --device, --processes, --host-memory and --fit, or --measure",
        )
    loaded = load_one_run(recipe, flags)
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import profile as work

    options = work.ProfileOptions(device, processes, memory, fit, measure, output, dry_run, host_memory)
    return work.profile(loaded, options, console, "debug" if verbose else "info")
