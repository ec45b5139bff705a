"""What models make of held-out rows and of tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.api.given import RecipeSource, absolute, console_of, loaded_of, overrides_of
from tuner.config.load import LoadedRecipe, RecipeText, load_recipe
from tuner.errors import RecipeError
from tuner.run.score import Score, TasksScore, find_trained, own_recipe, run_recipe, score, with_tasks
from tuner.run.score import score_tasks as score_on_tasks
from tuner.runtime.dist import RankInfo


def evaluate(
    model: str | Path, recipe: RecipeSource | None = None, overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Score:
    """Measure the loss of a run, a checkpoint or a Hugging Face directory on held-out rows, of each source and of all.

    The rows are those of `recipe`, by default of the run's own.
    """
    console = console_of("info", quiet)
    trained = find_trained(absolute(model), console)
    loaded = load_recipe(run_recipe(trained), overrides_of(overrides)) if recipe is None else loaded_of(recipe)
    if recipe is not None and overrides:
        raise RecipeError("overrides are of the run's own recipe; give load_recipe(recipe, overrides) in place of both")
    return score(trained, loaded, RankInfo.from_environment(), console)


def score_tasks(
    model: str | Path, tasks: Sequence[str] = ("recipe",), recipe: RecipeSource | None = None,
    overrides: Mapping[str, Any] | None = None, output: str | Path | None = None, quiet: bool = False,
) -> TasksScore:
    """Score a run, a checkpoint or a Hugging Face directory on tasks: files, ``lm_eval:NAME``, ``FILE.py:NAME``.

    ``"recipe"`` means those of `recipe`, by default of the run's own; the results of items go to `output`.
    """
    console = console_of("info", quiet)
    trained = find_trained(absolute(model), console)
    changes = with_tasks(overrides_of(overrides), tasks)
    if isinstance(recipe, LoadedRecipe):
        loaded = recipe if not changes else load_recipe(RecipeText(recipe.text, "recipe"), changes, recipe.directory)
    else:
        loaded = own_recipe(trained, changes) if recipe is None else load_recipe(recipe, changes)
    place = None if output is None else absolute(output)
    return score_on_tasks(trained, loaded, RankInfo.from_environment(), console, place)
