"""What functions are given, as what they call takes it: recipes, overrides, paths, and how much is said."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe, Override, load_recipe
from tuner.config.store_rules import inputs_of
from tuner.config.yaml import flow
from tuner.errors import RecipeError
from tuner.rundir.in_store import Extent, bring, bring_inputs
from tuner.rundir.model_path import require_base_model
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo
from tuner.stages import local_path

RecipeSource = LoadedRecipe | Path | str | Mapping[str, Any]
"""A loaded recipe, a file's path, a shipped recipe's name, or a mapping with the recipe's keys."""


def loaded_of(recipe: RecipeSource, fetches: bool = False) -> LoadedRecipe:
    """The recipe, loaded; what it reads of object stores is fetched where the caller does not do so.

    Raises RecipeError where it is wrong, or its model is a run or an adapter.
    """
    loaded = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)
    if fetches:
        bring_inputs(inputs_of(loaded.recipe), console_of("info", quiet=True).say)
    require_base_model(loaded.recipe.model.name_or_path, loaded.origins.get("model.name_or_path", "recipe"))
    return loaded


def overrides_of(values: Mapping[str, Any] | None) -> list[Override]:
    """Values by dotted key as the command line has them."""
    return [Override(key, value if isinstance(value, str) else flow(value)) for key, value in (values or {}).items()]


def console_of(level: Level, quiet: bool) -> Console:
    """What speaks on stderr: rank 0 alone."""
    return Console(RankInfo.from_environment().is_main, level_of(level, quiet))


def level_of(level: Level, quiet: bool) -> Level:
    """How much is said."""
    return "warning" if quiet and level in ("debug", "info") else level


def absolute(path: str | Path, extent: Extent | None = None) -> Path:
    """The path, from the working directory as it is now; the stage of a URL, fetched as far as ``extent`` says.

    Raises RecipeError for a URL without an extent, or of no store.
    """
    try:
        found = local_path(str(path), extent is not None)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from None
    if extent is not None:
        bring(found, console_of("info", quiet=True).say, extent)
    return found
