"""Recipes and the machine, looked at before anything is prepared or trained."""

from pathlib import Path
from typing import Any

from tuner.api.given import RecipeSource, absolute
from tuner.config.load import LoadedRecipe, ReadRecipe, read_recipe
from tuner.errors import RecipeError
from tuner.setup.check import check_recipe as check_all
from tuner.setup.machine import examine
from tuner.setup.machine_check import Check


def check_recipe(recipe: RecipeSource) -> tuple[Any, ...]:
    """Every problem of a recipe, as RecipeError's ``problems`` hold them; empty where there is none.

    Looked at are keys, files, templates, code and names of layers, as `tuner config check` does.
    """
    try:
        check_all(ReadRecipe(recipe, ()) if isinstance(recipe, LoadedRecipe) else read_recipe(recipe))
    except RecipeError as error:
        return tuple(error.problems)
    return ()


def doctor(directory: str | Path = ".") -> list[Check]:
    """Try what tuner needs of this machine; a check whose status is ``broken`` is of something that is needed."""
    return list(examine(absolute(directory)))
