"""Rows that ship, for who has none yet: `tuner init --example` writes them next to the recipe that it prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.config.paths import recipes_dir
from tuner.errors import RecipeError

INSTRUCT, BASE = "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"
"""Small enough to be trained on a processor in minutes."""


@dataclass(frozen=True)
class Example:
    """A task and its rows."""

    what: str
    """What a model learns from them."""
    model: str = INSTRUCT

    @staticmethod
    def named(name: str) -> Example:
        """Raises RecipeError for a name that none has."""
        if name not in EXAMPLES:
            raise RecipeError(f"no example {name!r}", hint=f"there are: {', '.join(EXAMPLES)}")
        return EXAMPLES[name]


EXAMPLES = {
    "orders": Example("chats: an order in words becomes JSON"),
    "reasoning": Example("chats whose answers think before they speak"),
    "preferences": Example("pairs of answers: short JSON is preferred to answers that talk"),
    "tools": Example("chats with tools: which one is called, with what, and what is said of its answer", BASE),
    "notes": Example("plain text, every token of which is learned", BASE),
}


def write_rows(name: str, directory: Path) -> Path:
    """Write the rows of an example as `NAME.jsonl`; returns the file. RecipeError where another is there."""
    rows = (recipes_dir() / "data" / f"{name}.jsonl").read_bytes()
    path = directory / f"{name}.jsonl"
    try:
        with path.open("xb") as file:
            file.write(rows)
    except FileExistsError:
        if path.read_bytes() != rows:
            raise RecipeError(f"{path} exists already, with other rows", hint="go to another directory") from None
    return path
