"""`tuner ladder`: one recipe at several sizes - planned, trained, compared at its marks, and continued by a law."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cli.command import Console, Flags, Outcome, command, console_of, level_of, load_for_command
from tuner.config.ladder import require_sizes

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.runtime.console import Level


@command("ladder plan")
def plan(
    flags: Flags, recipe: str | None = None, rung: str | None = None, device: str | None = None,
    quick: bool = False, output: str | None = None, verbose: bool = False,
) -> Outcome:
    """Print sizes, batches, processes, steps, tokens, FLOPs, memory and time of each rung; nothing is trained."""
    loaded, console, _ = _begun(flags, recipe, verbose)
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import ladder
    return ladder.plan(loaded, rung, device, quick, output, console)


@command("ladder run")
def run(flags: Flags, recipe: str | None = None, rung: str | None = None, verbose: bool = False) -> Outcome:
    """Train every rung that is not done, or one, and resume what was stopped or killed; rungs that are done stay."""
    loaded, console, level = _begun(flags, recipe, verbose)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.run(loaded, rung, console, level)


@command("ladder benchmark")
def benchmark(
    flags: Flags, rung: str, recipe: str | None = None, steps: int = 20, output: str | None = None,
    verbose: bool = False,
) -> Outcome:
    """Train a rung for a few steps and measure them: time, tokens a second, MFU, memory; nothing is saved of it."""
    loaded, console, level = _begun(flags, recipe, verbose)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.benchmark(loaded, rung, steps, output, console, level)


@command("ladder status")
def status(
    flags: Flags, ladder: str | None = None, marks: bool = False, everything: bool = False,
    also: list[str] | None = None,
) -> Outcome:
    """List the rungs: how far each is, which of its marks are reached, and the loss at the newest of them."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.status(ladder_marks.Where(ladder, flags, also or ()), marks, everything)


@command("ladder metrics")
def metrics(flags: Flags, ladder: str | None = None, prefix: str = "", also: list[str] | None = None) -> Outcome:
    """Print what was measured at each mark, before and after each decay, as CSV; with --json as JSON."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.metrics(ladder_marks.Where(ladder, flags, also or ()), prefix)


@command("ladder fit")
def fit(
    flags: Flags, ladder: str | None = None, target: str | None = None, tokens: str | None = None,
    loss: str = "loss", score: list[str] | None = None, chance: float | None = None, level: float = 0.9,
    samples: int = 1000, output: str | None = None, also: list[str] | None = None,
) -> Outcome:
    """Fit L = E + A/N^a + B/D^b to a ladder's rungs and predict a size that was not trained, with its interval."""
    from tuner.cli.work import ladder_marks

    settings = ladder_marks.Settings(level, samples)
    question = ladder_marks.ForecastQuestion(settings, loss, tuple(score or ()), chance)
    return ladder_marks.fit(ladder_marks.Where(ladder, flags, also or ()), question, target, tokens, output)


def _begun(flags: Flags, recipe: str | None, verbose: bool) -> tuple[LoadedRecipe, Console, Level]:
    """The recipe, which has sizes, and who says how much of what is done with it."""
    loaded = load_for_command(recipe, flags)
    require_sizes(loaded.recipe.ladder)
    level = level_of(loaded, verbose)
    return loaded, console_of(level), level
