"""What a recipe reads of object stores: what is fetched once cannot be looked at again and again."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.section import Rule
from tuner.stages import url_of

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe


def inputs_of(recipe: Recipe) -> dict[str, list[Path]]:
    """What a recipe reads of object stores, by key: stages, whose last names may be globs and slices."""
    held = recipe.data.eval if isinstance(recipe.data.eval, tuple) else ()
    paths = {
        "model.name_or_path": [recipe.model.name_or_path],
        "model.init_from": [each.path for each in recipe.model.init_from],
        "data.train": [each.path for each in recipe.data.train],
        "data.eval": [each.path for each in held],
    }
    stages = {key: [path for each in texts if url_of(path := Path(each)) is not None] for key, texts in paths.items()}
    return {key: found for key, found in stages.items() if found}


def newer_weights_are_on_a_disk(recipe: Recipe, given: Set[str]) -> str | None:
    """Newer versions of weights are looked for while training runs."""
    if not any(each.every is not None and url_of(Path(each.path)) is not None for each in recipe.model.init_from):
        return None
    return "newer weights are looked for on a disk; name a directory there, or remove every"


STORE_RULES = (Rule(("model.init_from",), newer_weights_are_on_a_disk),)
