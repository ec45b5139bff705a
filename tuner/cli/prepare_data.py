"""`tuner prepare-data`: rows to packed, encoded, content-addressed data."""

import os

from tuner.cli.command import Console, Flags, Outcome, command, load_for_command
from tuner.cli.output import real_stdout
from tuner.errors import RecipeError
from tuner.runtime.memory import calm_collector


@command("prepare-data")
def prepare_data(
    flags: Flags, console: Console, recipe: str | None = None, explain: int | None = None, check: bool = False,
    dry_run: bool = False, reference: bool = False, verbose: bool = False,
) -> Outcome:
    """Turn rows into packed, encoded data and print its directory; what is prepared already is found again."""
    if sum((explain is not None, check, dry_run, reference)) > 1:
        raise RecipeError("--explain, --check, --dry-run and --reference exclude each other", hint="give one of them")
    with calm_collector():
        loaded = load_for_command(recipe, flags, fetches=True)
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
