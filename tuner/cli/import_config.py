"""`tuner import`: a configuration of another tool, as a recipe."""

import sys
from pathlib import Path

from tuner.cli.command import Outcome, command
from tuner.errors import RecipeError

MOST_BYTES = 1 << 20


@command("import")
def import_config(file: str, tool: str | None = None, processes: int | None = None) -> Outcome:
    """Convert a configuration of axolotl, LLaMA-Factory, TRL, ArcticTraining and others to a commented recipe."""
    from tuner.config import imported, other_configs
    from tuner.config.load import recipe_dict

    known = next((name for name in other_configs.TOOLS if name == tool), None)
    if tool is not None and known is None:
        raise RecipeError(f"--from {tool}: not one of {', '.join(other_configs.TOOLS)}")
    path = Path(file).expanduser()
    found = imported.import_text(_text(file, path), "stdin" if file == "-" else path.name, known, processes,
                                 Path.cwd() if file == "-" else path.absolute().parent)  # fmt: skip
    print(f"read      {file}: {other_configs.dialects()[found.tool].title}", file=sys.stderr)
    return Outcome(
        found.text,
        artifacts={"tool": found.tool, "recipe": recipe_dict(found.recipe), "not_carried_over": list(found.left)},
        warnings=[f"not carried over: {item}" for item in found.left], next="tuner config check recipe.yaml",
        is_text=True,
    )


def _text(file: str, path: Path) -> str:
    try:
        if file == "-":
            return sys.stdin.read(MOST_BYTES + 1)
        with path.open(encoding="utf-8") as stream:
            return stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{file}: not UTF-8 text") from None
