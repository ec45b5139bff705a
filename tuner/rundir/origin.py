"""The recipe file that a run was started with, and whether it has changed since: a run resumes with its own copy."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe, flatten
from tuner.config.yaml import Problems, read_yaml
from tuner.errors import TunerError
from tuner.rundir.layout import RECIPE
from tuner.rundir.run_json import is_run, read_record

FILE, SHA256 = "recipe_file", "recipe_sha256"
"""What a launch notes in the record of the file that its recipe was read from."""
SHOWN_KEYS = 3


def noted(loaded: LoadedRecipe, run_dir: Path) -> dict[str, str]:
    """What the record notes of a launch's recipe file; nothing of a mapping's, or of the run's own copy."""
    path = loaded.path
    if path is None or path.absolute().is_relative_to(run_dir.absolute()):
        return {}
    return {FILE: str(path.absolute()), SHA256: hashlib.sha256(loaded.text.encode()).hexdigest()}


def origin(record: Mapping[str, Any]) -> Path | None:
    """The recipe file of the newest launch that was given one, whether it is still there or not."""
    launches = [launch for launch in record["launches"] if isinstance(launch.get(FILE), str)]
    return Path(launches[-1][FILE]) if launches else None


def changed_keys(run_dir: Path, record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The keys whose values a run's recipe file has changed since; None where it has not, or is gone or unreadable.

    Empty where they cannot be told: the run's copy is another launch's, or one of the two is no recipe any more.
    """
    file = origin(record)
    launches = [launch for launch in record["launches"] if FILE in launch]
    try:
        text = None if file is None else file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if text is None or hashlib.sha256(text.encode()).hexdigest() == launches[-1].get(SHA256):
        return None
    copy = run_dir / RECIPE
    if not copy.is_file() or hashlib.sha256(copy.read_bytes()).hexdigest() != launches[-1].get(SHA256):
        return ()
    before, after = _values(copy.read_bytes().decode()), _values(text)
    if before is None or after is None:
        return ()
    changed = tuple(sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)))
    return changed or None  # a comment


def warn_of_changed_file(run_dir: Path, warn: Callable[[str], None]) -> None:
    """Warn where a run is resumed with its own recipe although the file that it came from says something else."""
    try:
        record = read_record(run_dir) if is_run(run_dir) else None
        keys = None if record is None else changed_keys(run_dir, record)
    except TunerError:
        return  # whoever needs the record reports what is wrong with it
    file = None if record is None else origin(record)
    if file is None or keys is None:
        return
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    what = f" ({', '.join(keys[:SHOWN_KEYS])}{more})" if keys else ""
    warn(
        f"{file} has changed since the run was started{what}: the run resumes with its own recipe. To apply the "
        f"changed file: tuner train {file} --resume must (it names the --reset needed), or {another(file)} for another "
        "run"
    )


def another(recipe: Path) -> str:
    """The flag that makes another run of a recipe file: a name, unless the file itself says where its run goes."""
    try:
        text = recipe.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return (
        "--output_dir NEW-DIRECTORY"
        if re.search(r"^\s*output_dir\s*:", text, flags=re.MULTILINE)
        else "--name NEW-NAME"
    )


def _values(text: str) -> dict[str, Any] | None:
    problems = Problems()
    tree = read_yaml(text, "recipe.yaml", Path("/"), problems)
    return None if problems.found or not isinstance(tree.value, dict) else flatten(tree.plain())
