"""Prepared data."""

from __future__ import annotations

from tuner.api.given import RecipeSource, console_of, loaded_of
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.spec import prepare_spec


def prepare_data(recipe: RecipeSource, quiet: bool = False) -> PreparedInfo:
    """Prepare the recipe's data, or find it prepared; progress goes to stderr.

    Raises RecipeError, DataError and MachineError as `tuner prepare-data` reports them.
    """
    found = loaded_of(recipe).recipe
    spec = prepare_spec(found.model, found.tokenizer, found.data, found.method, found.seed)
    return prepare(spec, console_of(found.logging.level, quiet))
