"""The recipes that ship with the program."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".yaml"


def recipes_dir() -> Path:
    """Return the directory of the shipped recipes: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(recipes_dir().glob(f"*{SUFFIX}"))}


def shipped_scripts() -> dict[str, Path]:
    """Return the scripts for schedulers that ship with the recipes, by file name."""
    return {path.name: path for path in sorted((recipes_dir() / "slurm").glob("*.sbatch"))}


def summary(path: Path) -> str:
    """Return the comment that a recipe or script begins with: what it is for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
