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


def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after one in which memory is measured.")] = 3,
    memory: Annotated[str | None, typer.Option(help="Judge against this much, e.g. 24GiB, not what is free.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and measure nothing.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure time and peak memory of real training steps; nothing is saved, no run directory is touched."""

    def body() -> Outcome:
        from tuner.runtime.console import Console
        from tuner.runtime.launch import Launch

        loaded = load_for_command(recipe, overrides_of(ctx))
        limit = _bytes(memory)
        launch = Launch.from_environment()
        console = Console(main=launch.is_main, level="debug" if verbose else "info")
        from tuner.data.building.prepare import prepare
        from tuner.data.building.request import prepare_request
        from tuner.data.prepared import open_prepared
        from tuner.profile.measure import measure
        from tuner.runtime.process import process_group
        from tuner.train.setup import resolve, timetable

        wish = loaded.recipe
        request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
        prepared = open_prepared(prepare(request, console).path)
        resolved = resolve(wish, request.max_length, launch)
        plan = timetable(resolved.recipe, prepared).plan
        facts = resolved.facts
        console.say(
            "plan",
            f"{plan.total_steps:,} steps of {plan.global_batch_size} rows; one measured for memory, {steps} for time · "
            f"{facts.kind}, {resolved.recipe.train.precision} compute, {facts.threads} threads",
        )
        if dry_run:
            metrics = {"total_steps": plan.total_steps, "steps": steps, "dry_run": True}
            return Outcome("not measured: --dry-run", metrics=metrics, is_text=True)
        with process_group(launch, facts.kind, wish.parallel.timeout.seconds):
            report = measure(resolved, prepared, request.tokenizer, launch, steps, limit)
        console.say("time", report.time_text())
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
