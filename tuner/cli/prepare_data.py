"""`tuner prepare-data`: rows to packed, encoded, content-addressed data."""

import os
from typing import Annotated

import typer

from tuner.cli.command import (
    Outcome,
    RecipeArgument,
    VerboseOption,
    command,
    console_of,
    load_for_command,
    overrides_of,
)
from tuner.cli.output import real_stdout
from tuner.errors import RecipeError
from tuner.runtime.memory import calm_collector


@command("prepare-data")
def prepare_data(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            help="Show the first N rows, what is trained in brackets (piped: a JSON line per token), then stop.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the directory if it is prepared, else exit with 3; build nothing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be read and built, then stop.")] = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Also compute columns of a reference or teacher, as training would."),
    ] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Turn rows into packed, encoded data and print its directory; what is prepared already is found again."""
    if sum((explain is not None, check, dry_run, reference)) > 1:
        raise RecipeError("--explain, --check, --dry-run and --reference exclude each other", hint="give one of them")
    with calm_collector():
        loaded = load_for_command(recipe, overrides_of(ctx), fetches=True)
        console = console_of("debug" if verbose else "info")
        with console.doing("loading tokenizer", at_once=True):
            from tuner.cli.work import prepare_data as work

            spec = work.spec_of(loaded)
        if explain is not None:
            return work.explained(spec, explain, os.isatty(real_stdout()), verbose)
        if check:
            return work.checked(spec)
        if dry_run:
            return work.planned(spec, console)
        return work.prepared(loaded, spec, reference, console, verbose)
