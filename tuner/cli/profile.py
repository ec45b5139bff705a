"""`tuner profile`: what a run costs, measured on a few of its own steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.session import (
    DebugOption,
    JsonOption,
    Outcome,
    OutputOptions,
    RecipeArgument,
    VerboseOption,
    load_for_command,
    overrides_of,
    run_command,
)
from tuner.errors import MemoryLimitError, RecipeError

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.runtime.console import Level

STEPS = 3


def profile(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    measure: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take N real steps, after one in which memory is recorded.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Judge each process against this much, e.g. 24GiB, not what is free.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report here: report.html, report.json and a trace.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and measure nothing.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure time and peak memory of real training steps; nothing is saved, no run directory is touched."""

    def body() -> Outcome:
        loaded = load_for_command(recipe, overrides_of(ctx))
        level: Level = "debug" if verbose else "info"
        return _measured(loaded, measure or STEPS, _bytes(memory), output, (dry_run, level))

    run_command("profile", OutputOptions(json, verbose, debug), body)


def _measured(
    loaded: LoadedRecipe, steps: int, limit: int | None, output: Path | None, how: tuple[bool, Level]
) -> Outcome:
    from tuner.profile.launch import measure_recipe
    from tuner.profile.measure import MeasureOptions
    from tuner.profile.report import check_output, parts_table, write_report
    from tuner.runtime.console import Console
    from tuner.runtime.launch import Launch

    dry_run, level = how
    if output is not None:
        check_output(output)
    total_steps, found = measure_recipe(loaded, MeasureOptions(steps, limit, output), level, dry_run)
    if found is None:
        metrics = {"total_steps": total_steps, "steps": steps, "dry_run": True}
        return Outcome("not measured: --dry-run", metrics=metrics, is_text=True)
    console = Console(Launch.from_environment().is_main, level)
    console.say("memory", parts_table(found))
    console.say("time", found.time_text())
    artifacts = {}
    if output is not None and Launch.from_environment().is_main:
        artifacts = {name: str(path) for name, path in write_report(output, loaded.recipe, found).items()}
        console.say("report", artifacts["report"])
    if found.shortage is not None:
        console.say("held", found.shortage.table(), "warning")
        raise MemoryLimitError(found.shortage.line(), hint=found.shortage.hint())
    if not found.fits:
        raise MemoryLimitError(f"measured {found.text()}", hint="lower train.micro_batch_size or data.max_length")
    return Outcome(f"measured {found.text()}", artifacts=artifacts, metrics=found.as_json(), is_text=True)


def _bytes(text: str | None) -> int | None:
    from tuner.config.numbers import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"--memory {text}: {error}", hint="write 24GiB or 16GB") from None
