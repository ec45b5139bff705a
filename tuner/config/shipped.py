"""The recipes that ship with the program."""

from __future__ import annotations

from pathlib import Path

from tuner.config.paths import recipes_dir
from tuner.config.tree import Problems, dotted
from tuner.config.yaml import read_yaml

SUFFIX = ".yaml"
_FILE_KEYS = ("model.name", "tokenizer.", "data.train", "data.eval")


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(recipes_dir().glob(f"*{SUFFIX}"))}


def shipped_scripts() -> dict[str, Path]:
    """Return the scripts for schedulers that ship with the recipes, by file name."""
    return {path.name: path for path in sorted((recipes_dir() / "slurm").glob("*.sbatch"))}


def named_files(path: Path) -> list[Path]:
    """The relative paths that a shipped recipe names and that are local files or directories of the user or of ours.

    Hub names are not among them; what ships lies next to the recipe under the same name.
    """
    problems = Problems()
    tree = read_yaml(path.read_text(encoding="utf-8"), path.name, path.parent, problems)
    found: list[Path] = []
    for key, node in tree.leaves():
        name = dotted(key)
        if not isinstance(node.value, str) or not name.startswith(_FILE_KEYS):
            continue
        there = path.parent / node.value
        is_rows = name.startswith("data.") and Path(node.value).suffix in {".jsonl", ".json", ".txt", ".csv"}
        if not Path(node.value).is_absolute() and (there.exists() or is_rows):
            found.append(Path(node.value))
    return list(dict.fromkeys(found))


def summary(path: Path) -> str:
    """Return the comment that a recipe or script begins with: what it is for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
