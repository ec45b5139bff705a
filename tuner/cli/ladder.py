"""`tuner ladder`: one recipe at several sizes - planned, trained, compared at its marks, and continued by a law."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tuner.cli.command import (
    Outcome,
    command,
    console_of,
    level_of,
    load_for_command,
    overrides_of,
)
from tuner.config.ladder import require_sizes

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe


@command("ladder plan")
def plan(
    ctx: typer.Context, recipe: str | None = None, rung: str | None = None, device: str | None = None,
    quick: bool = False, output: str | None = None, verbose: bool = False,
) -> Outcome:
    """Print sizes, batches, processes, steps, tokens, FLOPs, memory and time of each rung; nothing is trained."""
    loaded = _ladder_recipe(ctx, recipe)
    console = console_of(level_of(loaded, verbose))
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import ladder
    return ladder.plan(loaded, rung, device, quick, output, console)


@command("ladder run")
def run(ctx: typer.Context, recipe: str | None = None, rung: str | None = None, verbose: bool = False) -> Outcome:
    """Train every rung that is not done, or one, and resume what was stopped or killed; rungs that are done stay."""
    loaded = _ladder_recipe(ctx, recipe)
    level = level_of(loaded, verbose)
    console = console_of(level)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.run(loaded, rung, console, level)


@command("ladder benchmark")
def benchmark(
    ctx: typer.Context, rung: str, recipe: str | None = None, steps: int = 20, output: str | None = None,
    verbose: bool = False,
) -> Outcome:
    """Train a rung for a few steps and measure them: time, tokens a second, MFU, memory; nothing is saved of it."""
    loaded = _ladder_recipe(ctx, recipe)
    level = level_of(loaded, verbose)
    console = console_of(level)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.benchmark(loaded, rung, steps, output, console, level)


@command("ladder status")
def status(
    ctx: typer.Context, ladder: str | None = None, marks: bool = False, everything: bool = False,
    also: list[str] | None = None,
) -> Outcome:
    """List the rungs: how far each is, which of its marks are reached, and the loss at the newest of them."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.status(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), marks, everything)


@command("ladder metrics")
def metrics(ctx: typer.Context, ladder: str | None = None, prefix: str = "", also: list[str] | None = None) -> Outcome:
    """Print what was measured at each mark, before and after each decay, as CSV; with --json as JSON."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.metrics(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), prefix)


@command("ladder fit")
def fit(
    ctx: typer.Context, ladder: str | None = None, target: str | None = None, tokens: str | None = None,
    loss: str = "loss", score: list[str] | None = None, chance: float | None = None, level: float = 0.9,
    samples: int = 1000, output: str | None = None, also: list[str] | None = None,
) -> Outcome:
    """Fit L = E + A/N^a + B/D^b to a ladder's rungs and predict a size that was not trained, with its interval."""
    from tuner.cli.work import ladder_marks

    options = ladder_marks.FitOptions(target, tokens, loss, tuple(score or ()), chance, level, samples, output)
    return ladder_marks.fit(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), options)



def _ladder_recipe(ctx: typer.Context, recipe: str | None) -> LoadedRecipe:
    loaded = load_for_command(recipe, overrides_of(ctx))
    require_sizes(loaded.recipe.ladder)
    return loaded
