"""`tuner prove`: hold every layout of a recipe against one process before it is trusted with a run."""

from typing import Annotated

import typer

from tuner.cli.command import Outcome, RecipeArgument, VerboseOption, command, console_of, load_one_run, overrides_of
from tuner.errors import RecipeError


@command("prove")
def prove(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    steps: Annotated[int, typer.Option(min=2, max=1000, help="Steps that each layout trains.")] = 20,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Layouts to prove, such as fsdp4,fsdp2+tp2; default: the recipe's own and all others."
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Hold the model itself, with its weights, to its class; no layouts.")
    ] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Train a small model of the recipe's architecture on this CPU under every layout, each against one process.

    Losses, gradients, norms, weights, copies and checkpoints are compared. Exit code 6 where any is unequal.
    """
    loaded = load_one_run(recipe, overrides_of(ctx))
    names = [] if layouts is None else [name.strip() for name in layouts.split(",") if name.strip()]
    if layouts is not None and not names:
        raise RecipeError("--layouts: names no layout", hint="write some, such as fsdp2,tp2")
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import prove

    return prove.weights(loaded, console) if weights else prove.layouts(loaded, steps, names, console)
