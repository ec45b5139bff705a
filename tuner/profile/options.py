"""Memory options of a recipe apart from rows, recomputing and sharding: what is written for each, what it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.config.optimizers import AdamwOptimizer
from tuner.config.recipe import LoraAdapter, Recipe
from tuner.config.rules import RULES
from tuner.setup.settled import OFFLOAD, TILED, changed, value_of

HOST_STATE = "optimizer.offload"
ASYNC = "checkpoint.async_save"
KIND = "adapter.kind"


@dataclass(frozen=True)
class Tradeoff:
    """Values that change what is computed, and how, key by key; none where nothing changes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    last_resort: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with its values."""
        values = dict(self.values)
        if values.pop(KIND, None) is not None:
            recipe = recipe.model_copy(update={"adapter": LoraAdapter(kind="lora")})
        return changed(recipe, values)


EIGHT_BIT = {"optimizer.state": "8bit"}
ROUNDED = {"model.dtype": "bf16", "optimizer.rounding": "stochastic"}
ADAPTED = {KIND: "lora"}
WORDS = {
    "optimizer.state": "AdamW's moments are kept in 8 bits",
    "model.dtype": "weights are kept in bf16",
    "optimizer.rounding": "updates are rounded to bf16 at random",
    "model.quantize": "the frozen base is kept in fewer bits",
    KIND: "an adapter is trained, not the weights",
}
"""What each key that changes results does to them."""


def memory_options(recipe: Recipe, device_kind: str) -> dict[str, tuple[Any, ...]]:
    """Keys that cost time and no accuracy, each with its values from the one that needs least memory on.

    A CPU has no memory but the host's; an adapter has little optimizer state to keep there.
    """
    if device_kind != "cuda":
        return {TILED: (True, False)}
    is_here = recipe.parallel.offload == "none" and recipe.adapter.kind == "none"
    has_state = isinstance(recipe.optimizer, AdamwOptimizer) and not recipe.optimizer.rows
    host_state = {HOST_STATE: ("host", "none")} if has_state and is_here else {}
    return {**host_state, TILED: (True, False), OFFLOAD: (True, False)}


def tradeoffs_of(recipe: Recipe) -> list[Tradeoff]:
    """What is tried one after the other, from what changes nothing to what changes most."""
    adapted, adamw = recipe.adapter.kind != "none", isinstance(recipe.optimizer, AdamwOptimizer)
    ways: list[Mapping[str, Any]] = [{}]
    if adapted and recipe.model.quantize == "none":
        ways += [{"model.quantize": "int8"}, {"model.quantize": "nf4"}]
    elif not adapted and adamw and not recipe.model.freeze:
        ways += [EIGHT_BIT, ROUNDED, {**EIGHT_BIT, **ROUNDED}]
    found = [_tradeoff(recipe, values) for values in ways]
    if not adapted and not recipe.model.freeze:
        found += [_tradeoff(recipe, values, True) for values in (ADAPTED, {**ADAPTED, "model.quantize": "nf4"})]
    distinct = [each for number, each in enumerate(found) if each not in found[:number]]
    return [each for each in distinct if not refusal(each.of(recipe))]


def _tradeoff(recipe: Recipe, values: Mapping[str, Any], last_resort: bool = False) -> Tradeoff:
    """Those of the values in which the recipe differs."""
    other = {key: value for key, value in values.items() if value_of(recipe, key) != value}
    return Tradeoff(other, {key: WORDS[key] for key in other}, last_resort)


def refusal(recipe: Recipe) -> str | None:
    """Why a recipe is refused when it is loaded; None where it is not."""
    return next((said for rule in RULES if (said := rule.check(recipe, set())) is not None), None)


def lines_to_write(recipe: Recipe) -> Sequence[str]:
    """What else would need less memory and changes results, as it is written, each with what it changes."""
    return [
        ", ".join(f"{key}: {value}" for key, value in each.values.items()) + f" ({'; '.join(each.changes.values())})"
        for each in tradeoffs_of(recipe)
        if each.values
    ]
