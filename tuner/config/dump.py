"""Writing a recipe back, so that loading it again gives the same recipe."""

from __future__ import annotations

import json
import re
from typing import Any

from tuner.config.leaves import shown
from tuner.config.recipe import EvalSection, Recipe
from tuner.config.yaml import resolve

_PLAIN = re.compile(r"[A-Za-z0-9/_]([A-Za-z0-9/_.% -]*[A-Za-z0-9/_.%-])?")


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values that load to the same recipe."""
    dumped: dict[str, Any] = recipe.model_dump(mode="json")
    if recipe.data.eval is None and recipe.eval.every == EvalSection().every:
        del dumped["eval"]["every"]  # written out, it would ask for held-out rows
    return dumped


def recipe_yaml(recipe: Recipe) -> str:
    """Return the whole recipe, defaults included, as YAML that loads to the same recipe."""
    lines: list[str] = []
    for key, value in recipe_dict(recipe).items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {flow(item)}" for name, item in value.items()]
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"


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
