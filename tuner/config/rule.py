"""What a rule between fields of the recipe is, and rules that are rows of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.stages import url_of

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe

Where = Mapping[str, Any]
"""What the values of keys are where something is wrong: the one that is written here, null for nothing or an empty
list, one of a list, none of ``not``, a list that ``lacks`` an item, a number ``above`` that of another key, a directory
that is ``stored`` in an object store, or any that is ``changed`` from the default. Of a list of sections one is
enough."""
_NAMED = re.compile(r"\{([a-z_.]+)\}")
"""In what is said, a key whose value stands there."""


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
    ways = {says: where if isinstance(where, list) else [where] for says, where in wrong.items()}
    split = {says: [[(key.split("."), value) for key, value in one.items()] for one in ways[says]] for says in wrong}

    def check(recipe: Recipe, given: Set[str]) -> str | None:
        for says, found in split.items():
            for where in found:
                if all(_holds(recipe, recipe, path, wanted) for path, wanted in where):
                    return _NAMED.sub(lambda named: str(attrgetter(named[1])(recipe)), says)
        return None

    return check


def _holds(recipe: Recipe, owner: Any, path: list[str], wanted: Any) -> bool:
    """Whether the value at a path, or one of those in a list of sections, is what is wanted."""
    value = owner
    for place, name in enumerate(path):
        owner = value
        if isinstance(owner, tuple):
            return any(_holds(recipe, each, path[place:], wanted) for each in owner)
        value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
    if not isinstance(wanted, dict):
        return _is(value, wanted)
    if "stored" in wanted:
        return url_of(Path(value or "/")) is not None
    if "changed" in wanted:
        field = type(owner).model_fields.get(path[-1])  # no kind of optimizer but some has betas
        return field is not None and bool(value != field.default)
    if "above" in wanted:
        bound = attrgetter(wanted["above"])(recipe)
        return value is not None and not isinstance(bound, str) and bool(value > bound)
    return wanted["lacks"] not in value if "lacks" in wanted else not _is(value, wanted["not"])


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(value, one) for one in wanted)
    if wanted is None or isinstance(value, str):
        return value in (None, (), {}) if wanted is None else bool(value == wanted)
    return bool(value == wanted) or str(value) == wanted
