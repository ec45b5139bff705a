"""Writing a recipe back, so that loading it again gives the same recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from tuner.config.paths import with_urls
from tuner.config.recipe import SECTIONS, EvalSection, Recipe
from tuner.config.value_types import shown
from tuner.config.yaml import resolve

_PLAIN = re.compile(r"[A-Za-z0-9/_]([A-Za-z0-9/_.% -]*[A-Za-z0-9/_.%-])?")


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values that load to the same recipe, with URLs where its paths stand for them."""
    dumped: dict[str, Any] = with_urls(recipe.model_dump(mode="json"))
    evaluates = recipe.data.eval is not None or recipe.eval.tasks
    if recipe.eval.every == EvalSection().every and (not evaluates or recipe.has_open_end):
        del dumped["eval"]["every"]  # written out, it would ask for held-out rows, or for the length of the run
    for name in SECTIONS:
        if not attrgetter(name)(recipe).is_on:
            above, _, last = name.rpartition(".")
            del (dumped[above] if above else dumped)[last]
    return dumped


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def recipe_yaml(
    recipe: Recipe, origins: Mapping[str, str] | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """Return the whole recipe, defaults included, as YAML that loads to the same recipe.

    With `origins`, where each written key comes from, every line ends with that as a comment; with `notes`, by dotted
    key, those lines do that have one.
    """
    lines: list[tuple[str, str]] = []
    for key, value in recipe_dict(recipe).items():
        if isinstance(value, dict):
            lines.append((f"{key}:", ""))
            lines += [(f"  {name}: {flow(item)}", f"{key}.{name}") for name, item in value.items()]
        else:
            lines.append((f"{key}: {flow(value)}", key))
    if origins is None:
        noted = {key: f"  # {one_line(note)}" for key, note in (notes or {}).items()}
        return "".join(f"{text}{noted.get(key, '')}\n" for text, key in lines)
    width = min(60, max(len(text) for text, _ in lines))
    return "".join(f"{text.ljust(width)}  # {_origin(key, origins)}\n" if key else f"{text}\n" for text, key in lines)


def one_line(text: str) -> str:
    """A text on one line, without what is no plain character."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _origin(key: str, origins: Mapping[str, str]) -> str:
    places = [where for name, where in origins.items() if name == key or name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(places)) or "default"


def flow(value: Any) -> str:
    """Write one value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return repr(value)
    return shown(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and resolve(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)
