"""The recipes that ship with the program."""

from pathlib import Path

from tuner.config.paths import recipes_dir
from tuner.config.tree import Node, Problems
from tuner.config.yaml import read_yaml

SUFFIX = ".yaml"


def shipped_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(recipes_dir().glob(f"*{SUFFIX}"))}


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
