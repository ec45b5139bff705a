"""Rules between a ladder and the rest of its recipe: each returns what is wrong, if anything."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner.config.rule import Rule

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


def starts_at_random(recipe: Recipe, given: Set[str]) -> str | None:
    """There are no pretrained weights of sizes that follow from a recipe."""
    if not recipe.ladder.sizes or recipe.model.init == "random":
        return None
    return "sizes of a ladder are trained from random weights; set model.init: random"


def trains_whole_models(recipe: Recipe, given: Set[str]) -> str | None:
    """Rules by the number of parameters count those that are trained."""
    if not recipe.ladder.sizes or recipe.adapter.kind == "none":
        return None
    return "a ladder trains whole models; set adapter.kind: none"


def compares_held_out_rows(recipe: Recipe, given: Set[str]) -> str | None:
    """Sizes see different numbers of tokens: only held-out rows compare them."""
    if not recipe.ladder.sizes or recipe.data.eval is not None:
        return None
    return "a ladder compares losses on held-out rows; set data.eval, such as 2%"


def rules_alone(recipe: Recipe, given: Set[str], key: str) -> str | None:
    """Whether a key that the ladder sets has another value than its default."""
    ladder, ruled = recipe.ladder, RULED[key]
    left = ruled.leaves is not None and getattr(ladder, ruled.leaves) == "recipe"
    if not ladder.sizes or left or key not in given or _is_default(recipe, key):
        return None
    other = "" if ruled.leaves is None else f", or write ladder.{ruled.leaves}: recipe"
    return f"each size of the ladder gets its own, by {ruled.by}; remove it{other}"


def evaluates_initial(recipe: Recipe, given: Set[str]) -> str | None:
    """The mark before the first step is evaluated, as every mark is."""
    if not recipe.ladder.initial or recipe.eval.at_start:
        return None
    return "ladder.initial evaluates each size before its first step; remove at_start, or write ladder.initial: false"


def _is_default(recipe: Recipe, key: str) -> bool:
    """Whether a key's value is what it is without being written, as where a whole recipe was written out."""
    section, _, name = key.partition(".")
    value: Any = getattr(recipe, section)
    if not name:
        return bool(value == type(recipe).model_fields[section].default)
    return not hasattr(value, name) or bool(getattr(value, name) == type(value).model_fields[name].default)


LADDER_RULES = (
    Rule(("model.init", "ladder.sizes"), starts_at_random),
    Rule(("adapter.kind", "ladder.sizes"), trains_whole_models),
    Rule(("ladder.sizes", "data.eval"), compares_held_out_rows),
    Rule(("eval.at_start", "ladder.initial"), evaluates_initial),
    *(Rule((key, "ladder.sizes"), partial(rules_alone, key=key)) for key in RULED),
)
