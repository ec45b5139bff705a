"""The whole recipe with, beside each line, where its value comes from."""

from __future__ import annotations

from tuner.config.dump import flow, recipe_dict
from tuner.config.load import LoadedRecipe


def with_origins(loaded: LoadedRecipe) -> str:
    """Return the recipe as YAML with a comment on each line: its place, its flag, or `default`."""
    lines: list[tuple[str, str]] = []
    for key, value in recipe_dict(loaded.recipe).items():
        if isinstance(value, dict):
            lines.append((f"{key}:", ""))
            lines += [(f"  {name}: {flow(item)}", _origin(loaded, f"{key}.{name}")) for name, item in value.items()]
        else:
            lines.append((f"{key}: {flow(value)}", _origin(loaded, key)))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(f"{text.ljust(width)}  # {origin}" if origin else text for text, origin in lines) + "\n"


def _origin(loaded: LoadedRecipe, key: str) -> str:
    places = [where for name, where in loaded.origins.items() if name == key or name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(places)) or "default"
