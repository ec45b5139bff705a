"""The lines that a message proposes, read out of its text as its reader would, and the recipe that they make."""

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.config.check import check
from tuner.config.fields import fields, find
from tuner.config.load import flatten, recipe_dict
from tuner.config.recipe import UNIONS
from tuner.config.yaml import Problems, read_yaml, tree_of
from tuner.errors import RecipeError

_PROPOSES = re.compile(r"(?P<verb>\b(?:write|did you mean|with|and|set))\s+(?:--)?(?=[a-z_])")
_KEY = re.compile(r"(?P<key>[a-z_][a-z_0-9]*(?:\.(?:[a-z_][a-z_0-9]*|\d+))*)(?P<sign>:\s+|\b)")
_CLOSING = {"[": "]", "{": "}"}
_ENDS = re.compile(r",\s|;\s|\s(?:and|or)\s+[a-z_]+(?:\.[a-z_0-9]+)+\b|\s\(|$|\?$")


def value_at(text: str) -> str:
    """The YAML value that a text begins with: a list or mapping to its end, a quoted text, or up to a comma."""
    if text[:1] in {"'", '"'}:
        return text[: text.find(text[0], 1) + 1]
    if text[:1] in _CLOSING:
        depth = 0
        for place, char in enumerate(text):
            depth += (char in _CLOSING) - (char in _CLOSING.values())
            if depth == 0:
                return text[: place + 1]
    found = _ENDS.search(text)
    return text[: found.start()] if found else text


def plain(text: str) -> Any:
    """A value in YAML as the recipe reads it."""
    problems = Problems()
    found = read_yaml(f"value: {text}", "value", Path(), problems).child("value")
    if problems.found or found is None:
        raise ValueError(f"not a value: {text}")
    return found.plain()


def proposed(message: str, key: str = "") -> dict[str, Any]:
    """Our keys with the values that a message asks to write; a key that is proposed without one has `...`,
    and one that is left to choose for, such as `sgd or muon`, a tuple of these.

    What follows `instead` is another way to the same end, not a line for the value that was given.
    """
    told = re.split(r"; instead |not supported: |not needed: |; here it is ", message)[0]
    found: dict[str, Any] = {}
    for pattern, name in ((r"; write kind: (\w+) under it", f"{key}.kind"), (r"^got .*; write (?!kind:)(.+)", key)):
        if key and (match := re.search(pattern, told)) and not _names_a_key(match[1]):
            found[name] = plain(value_at(match[1]))
    for start in _PROPOSES.finditer(told):
        match = _KEY.match(told, start.end())
        if match is None or not _is_ours(match["key"]):
            continue
        if match["sign"].startswith(":"):
            text = value_at(told[match.end() :])
            found[match["key"]] = tuple(map(plain, text.split(" or "))) if " or " in text else plain(text)
        elif start["verb"] in {"write", "did you mean"}:
            found.setdefault(match["key"], ...)
    whole = {name: value for name, value in found.items() if isinstance(value, Mapping) and find(name) is None}
    for name, value in whole.items():
        found |= {f"{name}.{inner}": item for inner, item in found.pop(name).items()}
        del value
    return found


def _names_a_key(text: str) -> bool:
    match = _KEY.match(text)
    return match is not None and match["sign"].startswith(":") and _is_ours(match["key"])


def _is_ours(key: str) -> bool:
    return find(key) is not None or any(name.startswith(f"{key}.") for name in fields())


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping over another, sections into each other."""
    result = dict(deepcopy(base))
    for key, value in more.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result


def without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A mapping without one dotted key."""
    result = dict(deepcopy(tree))
    *sections, name = key.split(".")
    owner: Any = result
    for section in sections:
        owner = owner.get(section) if isinstance(owner, dict) else owner[int(section)]
    if isinstance(owner, dict):
        owner.pop(name, None)
    return result


def written(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with dotted keys written into it; `data.train[0].path` is the path of its first source."""
    result = dict(deepcopy(base))
    for section, kinds in UNIONS.items():
        kind = values.get(f"{section}.kind", ...)
        mine = result.get(section)
        if isinstance(kind, str) and kind in kinds and isinstance(mine, dict) and mine.get("kind") != kind:
            result[section] = {key: value for key, value in mine.items() if key in kinds[kind].model_fields}
    for key, value in values.items():
        name, listed, inner = key.partition("[0].")
        *sections, last = name.split(".")
        owner = result
        for section in sections:
            if not isinstance(owner.get(section), dict):
                owner[section] = {}
            owner = owner[section]
        if not listed:
            owner[last] = value
            continue
        source = owner.get(last)
        item = dict(source[0]) if isinstance(source, list) and isinstance(source[0], dict) else {}
        first = source[0] if isinstance(source, list) else source
        if not item and isinstance(first, str):
            item = {"path": first}
        owner[last] = [item | {inner: value}]
    return result


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the recipe that a mapping is, with its value. Raises RecipeError."""
    return _resolved(json.dumps(tree, sort_keys=True))


@lru_cache(4096)
def _resolved(text: str) -> dict[str, Any]:
    problems = Problems()
    recipe = check(tree_of(json.loads(text), "recipe", Path()), problems)
    if recipe is None or problems.found:
        raise RecipeError.of(problems.found)
    return flatten(recipe_dict(recipe))


def differences(values: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys whose value is another than that of `base`."""
    for key in sorted(values.keys() | base.keys()):
        if values.get(key) != base.get(key):
            yield key, values.get(key)
