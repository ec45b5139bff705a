"""`tuner prove`: hold every layout of a recipe against one process before it is trusted with a run."""

from tuner.cli.command import Console, Flags, Outcome, command, load_one_run
from tuner.errors import RecipeError


@command("prove")
def prove(
    flags: Flags, console: Console, recipe: str | None = None, steps: int = 20, layouts: str | None = None,
    weights: bool = False,
) -> Outcome:
    """Train a small model of the recipe's architecture on this CPU under every layout, each against one process.

    Losses, gradients, norms, weights, copies and checkpoints are compared. Exit code 6 where any is unequal.
    """
    loaded = load_one_run(recipe, flags)
    names = [] if layouts is None else [name.strip() for name in layouts.split(",") if name.strip()]
    if layouts is not None and not names:
        raise RecipeError("--layouts: names no layout", hint="write some, such as fsdp2,tp2")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work import prove

    return prove.weights(loaded, console) if weights else prove.layouts(loaded, steps, names, console)
