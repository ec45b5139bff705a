"""`tuner ladder`: one recipe at several sizes - planned, trained, compared at its marks, and continued by a law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.command import (
    Outcome,
    RecipeArgument,
    VerboseOption,
    command,
    console_of,
    level_of,
    load_for_command,
    overrides_of,
)
from tuner.config.ladder import require_sizes

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe

LADDER = "Recipe of the ladder, or the directory that holds its rungs; default ./recipe.yaml."
LadderArgument = Annotated[str | None, typer.Argument(metavar="[LADDER]", help=LADDER)]
RungOption = Annotated[
    str | None, typer.Option(metavar="RUNG", help="One rung alone: its name, or its number from 1, as job arrays have.")
]
AlsoOption = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR", help="Another ladder's directory with runs of the same rungs; may be repeated."),
]
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
@command("ladder plan")
def plan(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    rung: RungOption = None,
    device: Annotated[
        str | None,
        typer.Option(help="Predict for this device, e.g. h100-80g or cpu; default: the one in this machine."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the prediction of memory and time.")] = False,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw learning rates and marks over tokens: plan.html, or plan.png."),
    ] = None,
    verbose: VerboseOption = False,
) -> Outcome:
    """Print sizes, batches, processes, steps, tokens, FLOPs, memory and time of each rung; nothing is trained."""
    loaded = _ladder_recipe(ctx, recipe)
    console = console_of(level_of(loaded, verbose))
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import ladder
    return ladder.plan(loaded, rung, device, quick, output, console)


@app.command()
@command("ladder run")
def run(
    ctx: typer.Context, recipe: RecipeArgument = None, rung: RungOption = None, verbose: VerboseOption = False
) -> Outcome:
    """Train every rung that is not done, or one, and resume what was stopped or killed; rungs that are done stay."""
    loaded = _ladder_recipe(ctx, recipe)
    level = level_of(loaded, verbose)
    console = console_of(level)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.run(loaded, rung, console, level)


@app.command()
@command("ladder benchmark")
def benchmark(
    ctx: typer.Context,
    rung: Annotated[str, typer.Argument(metavar="RUNG", help="The rung: its name, or its number from 1.")],
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that are timed, after one that is not.")] = 20,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where the figures go; default benchmark-RUNG.json in the ladder."),
    ] = None,
    verbose: VerboseOption = False,
) -> Outcome:
    """Train a rung for a few steps and measure them: time, tokens a second, MFU, memory; nothing is saved of it."""
    loaded = _ladder_recipe(ctx, recipe)
    level = level_of(loaded, verbose)
    console = console_of(level)
    with console.doing("loading libraries", at_once=True):
        from tuner.cli.work import ladder
    return ladder.benchmark(loaded, rung, steps, output, console, level)


@app.command()
@command("ladder status")
def status(
    ctx: typer.Context,
    ladder: LadderArgument = None,
    marks: Annotated[bool, typer.Option("--marks", help="List each mark, and where it is.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every other checkpoint, too.")] = False,
    also: AlsoOption = None,
) -> Outcome:
    """List the rungs: how far each is, which of its marks are reached, and the loss at the newest of them."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.status(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), marks, everything)


@app.command()
@command("ladder metrics")
def metrics(
    ctx: typer.Context,
    ladder: LadderArgument = None,
    prefix: Annotated[str, typer.Option(help="Figures whose names begin so alone, besides the loss: sums/.")] = "",
    also: AlsoOption = None,
) -> Outcome:
    """Print what was measured at each mark, before and after each decay, as CSV; with --json as JSON."""
    from tuner.cli.work import ladder_marks

    return ladder_marks.metrics(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), prefix)


@app.command()
@command("ladder fit")
def fit(
    ctx: typer.Context,
    ladder: Annotated[
        str | None,
        typer.Argument(
            metavar="[LADDER]",
            help="Recipe or directory of a ladder, or a CSV of points; - reads its path; default ./recipe.yaml.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Rung, which is left out of the fit and predicted, or parameters such as 1B, with --tokens."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens that the target is trained on, such as 20B.")] = None,
    loss: Annotated[str, typer.Option(help="Figure that the law is fitted to.")] = "loss",
    score: Annotated[
        list[str] | None,
        typer.Option(help="Figure between 0 and 1 that is predicted from the loss by a sigmoid; may be repeated."),
    ] = None,
    chance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Score of guessing, which fixes the sigmoid's floor.")
    ] = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.99, help="Share of cases that intervals hold.")] = 0.9,
    samples: Annotated[int, typer.Option(min=100, max=20000, help="Samples of the bootstrap.")] = 1000,
    output: Annotated[
        str | None, typer.Option(help="The page to write; default fit.html in the ladder, or here for a CSV.")
    ] = None,
    also: AlsoOption = None,
) -> Outcome:
    """Fit L = E + A/N^a + B/D^b to a ladder's rungs and predict a size that was not trained, with its interval."""
    from tuner.cli.work import ladder_marks

    options = ladder_marks.FitOptions(target, tokens, loss, tuple(score or ()), chance, level, samples, output)
    return ladder_marks.fit(ladder_marks.Where(ladder, overrides_of(ctx), also or ()), options)



def _ladder_recipe(ctx: typer.Context, recipe: str | None) -> LoadedRecipe:
    loaded = load_for_command(recipe, overrides_of(ctx))
    require_sizes(loaded.recipe.ladder)
    return loaded
