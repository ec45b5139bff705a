"""`tuner profile`: what a run costs, measured on a few of its own steps."""

from __future__ import annotations

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
    from tuner.profile.measure import ProfileReport
    from tuner.runtime.console import Level


def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after one in which memory is measured.")] = 3,
    memory: Annotated[
        str | None, typer.Option(help="Judge each process against this much, e.g. 24GiB, not what is free.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and measure nothing.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure time and peak memory of real training steps; nothing is saved, no run directory is touched."""

    def body() -> Outcome:
        loaded = load_for_command(recipe, overrides_of(ctx))
        limit = _bytes(memory)
        from tuner.profile.launch import ProfileOptions
        from tuner.profile.launch import profile as measured
        from tuner.runtime.console import Console
        from tuner.runtime.launch import Launch

        level: Level = "debug" if verbose else "info"
        total_steps, report = measured(loaded, ProfileOptions(steps, limit, dry_run), level)
        if report is None:
            metrics = {"total_steps": total_steps, "steps": steps, "dry_run": True}
            return Outcome("not measured: --dry-run", metrics=metrics, is_text=True)
        Console(Launch.from_environment().is_main, level).say("time", report.time_text())
        if not report.fits:
            raise MemoryLimitError(
                f"measured {report.text()}",
                hint="lower train.micro_batch_size or data.max_length, or train an adapter (--adapter.kind lora)",
            )
        return Outcome(f"measured {report.text()}", metrics=_metrics(report), is_text=True)

    run_command("profile", OutputOptions(json, verbose, debug), body)


def _metrics(report: ProfileReport) -> dict[str, object]:
    from dataclasses import asdict

    return {**asdict(report), "fits": report.fits}


def _bytes(text: str | None) -> int | None:
    from tuner.config.numbers import parse_bytes

    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"--memory {text}: {error}", hint="write 24GiB or 16GB") from None
