"""What ships with the program: recipes, scripts, and rows for who has none yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.config.paths import recipes_dir
from tuner.config.yaml import Node, Problems, read_yaml
from tuner.errors import RecipeError


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(recipes_dir().glob("*.yaml"))}


def shipped_scripts() -> dict[str, Path]:
    """Return the scripts for schedulers that ship with the recipes, by file name."""
    return {path.name: path for path in sorted((recipes_dir() / "slurm").glob("*.sbatch"))}


def named_files(path: Path) -> list[Path]:
    """The files and directories that a shipped recipe names and that ship next to it, relative to it."""
    tree = read_yaml(path.read_text(encoding="utf-8"), path.name, path.parent, Problems())
    return list(dict.fromkeys(Path(str(node.value)) for _, node in tree.leaves() if ships(path.parent, node)))


def ships(recipes: Path, node: Node) -> bool:
    """Whether a value of a shipped recipe is the name of what lies next to it."""
    return isinstance(node.value, str) and (recipes / node.value).exists()


def summary(path: Path) -> str:
    """Return the comment that a recipe or script begins with: what it is for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


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
