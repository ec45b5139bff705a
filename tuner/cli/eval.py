"""`tuner eval`: loss and figures of a run, a checkpoint, a Hugging Face directory or a hub model, or its scores."""

from pathlib import Path

from tuner.cli.command import Console, Flags, Outcome, command
from tuner.cli.named import Engine, require_engine, run_or_hub
from tuner.errors import RecipeError
from tuner.rundir.model_path import HubModel


@command("eval")
def eval(  # noqa: A001 - the command's name
    flags: Flags, console: Console, model: str, recipe: str | None = None, tasks: list[str] | None = None,
    output: str | None = None, engine: Engine = "transformers",
) -> Outcome:
    """Measure loss and figures on held-out rows, of each source and of all, or score tasks, and print them."""
    if output is not None and not tasks:
        raise RecipeError("--output is for the results of tasks", hint="add --tasks FILE.jsonl")
    if model == recipe == "-":
        raise RecipeError("only one of the two can be read from stdin")
    path = run_or_hub(model)
    is_served = require_engine(path.name if isinstance(path, HubModel) else str(path), engine)
    with console.doing("loading torch", at_once=True):
        from tuner.cli.work.eval import evaluate, evaluate_served

    if is_served and isinstance(path, Path):
        return evaluate_served(path, recipe, flags, tasks or [], output, console)
    return evaluate(path, recipe, flags, tasks, output, console)
