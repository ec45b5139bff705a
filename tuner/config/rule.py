"""What a rule between fields of the recipe is, and rules that are rows of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe

Where = Mapping[str, Any]
"""What the values of keys are where something is wrong: the one that is written here, null for nothing or an empty
list, one of a list, none of ``not``, a list that ``lacks`` an item, or any that is ``changed`` from the default."""


@dataclass(frozen=True)
class Rule:
    """A check of several keys; it is skipped when one of `keys` is itself wrong. `keys[0]` is blamed."""

    keys: tuple[str, ...]
    check: Callable[[Recipe, Set[str]], str | None]
    """What is wrong, if anything, with a recipe in which these keys are written."""


def table_rules(name: str) -> tuple[Rule, ...]:
    """The rules of a JSON file of this package: of each its keys, and what is said where values are so and so."""
    rows = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return tuple(Rule(tuple(row["keys"]), _check(row["wrong"])) for row in rows.values())


def _check(wrong: Mapping[str, Where | list[Where]]) -> Callable[[Recipe, Set[str]], str | None]:
    def check(recipe: Recipe, given: Set[str]) -> str | None:
        for says, where in wrong.items():
            if any(_all_hold(recipe, one) for one in (where if isinstance(where, list) else [where])):
                return says.format(**dict(recipe))
        return None

    return check


def _all_hold(recipe: Recipe, where: Where) -> bool:
    for key, wanted in where.items():
        owner: Any = None
        value: Any = recipe
        for part in key.split("."):
            owner, value = value, value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if wanted == {"changed": True}:
            if value == type(owner).model_fields[key.rpartition(".")[2]].default:
                return False
        elif not _holds(value, wanted):
            return False
    return True


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return wanted["lacks"] not in value if "lacks" in wanted else not _holds(value, wanted["not"])
    if isinstance(wanted, list):
        return any(_holds(value, one) for one in wanted)
    return value in (None, (), {}) if wanted is None else bool(value == wanted or str(value) == wanted)
