"""Rules between a ladder and the rest of its recipe: each returns what is wrong, if anything."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner.config.rule import Rule, table_rules

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe


@dataclass(frozen=True)
class Ruled:
    """A key that the ladder sets for each size: by which of its keys, and which of them may leave it to the recipe."""

    by: str
    leaves: str | None = None


RULED: Mapping[str, Ruled] = {
    "train.duration": Ruled("ladder.tokens and ladder.multiples"),
    "train.global_batch_size": Ruled("ladder.batch_tokens", "batch_tokens"),
    "optimizer.lr": Ruled("ladder.lr", "lr"),
    "optimizer.betas": Ruled("ladder.beta2", "beta2"),
    "schedule": Ruled("ladder.multiples, ladder.decay and ladder.warmup_tokens"),
    "checkpoint.marks": Ruled("ladder.multiples and ladder.decay"),
    "eval.marks": Ruled("ladder.multiples and ladder.decay"),
}
"""What of a recipe belongs to its ladder."""


def rules_alone(recipe: Recipe, given: Set[str], key: str) -> str | None:
    """Whether a key that the ladder sets has another value than its default."""
    ladder, ruled = recipe.ladder, RULED[key]
    left = ruled.leaves is not None and getattr(ladder, ruled.leaves) == "recipe"
    if not ladder.sizes or left or key not in given or _is_default(recipe, key):
        return None
    other = "" if ruled.leaves is None else f", or write ladder.{ruled.leaves}: recipe"
    return f"each size of the ladder gets its own, by {ruled.by}; remove it{other}"


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether a key's value is what it is without being written, as where a whole recipe was written out."""
    section, _, name = key.partition(".")
    value: Any = getattr(recipe, section)
    if not name:
        return bool(value == type(recipe).model_fields[section].default)
    return not hasattr(value, name) or bool(getattr(value, name) == type(value).model_fields[name].default)


LADDER_RULES = (
    *table_rules("ladder_rules"),
    *(Rule((key, "ladder.sizes"), partial(rules_alone, key=key)) for key in RULED),
)
