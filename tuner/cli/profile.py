"""`tuner profile`: what a run needs and costs, predicted for any device, or measured on a few of its own steps."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.command import Outcome, RecipeArgument, VerboseOption, command, console_of, load_one_run, overrides_of
from tuner.errors import RecipeError


@command("profile")
def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    device: Annotated[
        str | None,
        typer.Option(help="Predict for this device, e.g. h100-80g or cpu; default: the one in this machine."),
    ] = None,
    processes: Annotated[
        str | None, typer.Option(help="Predict for this many processes, e.g. 8, or 4x8 on four machines.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Judge each process against this much memory, e.g. 24GiB, instead of what is free."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="[SIZE]", help="Find the fastest setting that fits the device, or SIZE for each process (24GiB)."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each machine's host, e.g. 128GiB, for what is kept there; default: the device's share."
        ),
    ] = None,
    measure: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take N real steps and measure them; predicts nothing.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report here: report.html, report.json and a trace.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and measure nothing.")] = False,
    verbose: VerboseOption = False,
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
    loaded = load_one_run(recipe, overrides_of(ctx))
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import profile as work

    options = work.ProfileOptions(device, processes, memory, fit, measure, output, dry_run, host_memory)
    return work.profile(loaded, options, console, "debug" if verbose else "info")
