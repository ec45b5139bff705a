"""`tuner recipes`: the recipes that ship."""

import shutil
import sys
from difflib import get_close_matches
from pathlib import Path

from tuner.cli.command import Outcome, command
from tuner.cli.output import listed, stdout_columns
from tuner.config.shipped import named_files, shipped_recipes, shipped_scripts, summary
from tuner.errors import RecipeError


def _find(name: str) -> Path:
    shipped = shipped_recipes() | shipped_scripts()
    key = name.removesuffix(".yaml")
    if key not in shipped:
        near = get_close_matches(key, shipped, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(shipped)}"
        raise RecipeError(f"no shipped recipe or script {name}", hint=hint)
    return shipped[key]


@command("recipes list")
def list_recipes() -> Outcome:
    """List the shipped recipes and scripts, one a line, with what each is for."""
    lines = {name: summary(path) for name, path in (shipped_recipes() | shipped_scripts()).items()}
    return Outcome(listed(lines, stdout_columns()), artifacts={"recipes": lines}, is_table=True)


@command("recipes show")
def show(name: str) -> Outcome:
    """Print a shipped recipe or script."""
    return Outcome(_find(name).read_text(encoding="utf-8"), is_text=True)


@command("recipes copy")
def copy(name: str, target: Path | None = None) -> Outcome:
    """Copy a shipped recipe or script, and the rows and models it names; an existing file is never overwritten."""
    source = _find(name)
    path = (target or Path(source.name)).absolute()
    if path.is_dir():
        path /= source.name
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{path} exists already", hint="name another file") from None
    except FileNotFoundError:
        raise RecipeError(f"no directory {path.parent}") from None
    if source.suffix != ".yaml":
        return Outcome(str(path), next=f"sbatch {path} RECIPE")
    files, warnings = copy_named(source, path.parent)
    return Outcome(str(path), artifacts={"files": files}, warnings=warnings, next=f"tuner config check {path}")


def copy_named(recipe: Path, directory: Path) -> tuple[list[str], list[str]]:
    """Copy what a shipped recipe names next to its copy; return the files, and what the user should know of them.

    A file that is there already stays as it is.
    """
    files, warnings = [], []
    for name in named_files(recipe):
        shipped, place = recipe.parent / name, directory / name
        if place.exists():
            warnings.append(f"{place} was there already and is left as it is")
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if shipped.is_dir():
            shutil.copytree(shipped, place)
        else:
            shutil.copyfile(shipped, place)
        print(f"copied    {place}", file=sys.stderr)
        files.append(str(place))
    return files, warnings
