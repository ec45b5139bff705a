"""`tuner eval`: loss and figures of a run, a checkpoint, a Hugging Face directory or a hub model, or its scores."""

from pathlib import Path

import typer

from tuner.cli.command import Outcome, command, console_of, overrides_of
from tuner.cli.named import Engine, require_engine, run_or_hub
from tuner.errors import RecipeError
from tuner.rundir.model_path import HubModel


@command("eval")
def eval(  # noqa: A001 - the command's name
    ctx: typer.Context, model: str, recipe: str | None = None, tasks: list[str] | None = None,
    output: str | None = None, engine: Engine = "transformers", verbose: bool = False,
) -> Outcome:
    """Measure loss and figures on held-out rows, of each source and of all, or score tasks, and print them."""
    if output is not None and not tasks:
        raise RecipeError("--output is for the results of tasks", hint="add --tasks FILE.jsonl")
    if model == recipe == "-":
        raise RecipeError("only one of the two can be read from stdin")
    path = run_or_hub(model)
    is_served = require_engine(path.name if isinstance(path, HubModel) else str(path), engine)
    console = console_of("debug" if verbose else "info")
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work.eval import evaluate, evaluate_served

    if is_served and isinstance(path, Path):
        return evaluate_served(path, recipe, overrides_of(ctx), tasks or [], output, console)
    return evaluate(path, recipe, overrides_of(ctx), tasks, output, console)
