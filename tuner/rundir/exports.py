"""A run's `exports` directory: the link to the newest export, and which older ones go."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import step_dirs
from tuner.errors import DataError
from tuner.rundir.layout import LATEST
from tuner.runtime.files import TMP_PREFIX, discard_dir, fsync_dir, machine_errors, read_json

UNFINISHED_LINK = f"{TMP_PREFIX}{LATEST}-"
"""What `latest` is called before it takes the place of the one before; whoever is killed then leaves it."""
LINEAGE = "tuner.json"
"""What an export says of its origin."""


APART = "adapter_apart"
"""Of a checkpoint's facts: its adapter shares its weight with another layer, so that it cannot be merged."""


def link_latest(directory: Path, name: str) -> None:
    """Have the link `latest` in a directory point to `name`; a reader finds the old or the new export, never none.

    Raises MachineError.
    """
    link = directory / LATEST
    fresh = directory / f"{UNFINISHED_LINK}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with machine_errors(link):
            for left in directory.glob(f"{UNFINISHED_LINK}*"):  # by one that was killed
                if not Path("/proc", left.name.removeprefix(UNFINISHED_LINK).partition("-")[0]).exists():
                    left.unlink(missing_ok=True)
            os.symlink(name, fresh)
            os.rename(fresh, link)
            fsync_dir(directory)
    finally:
        fresh.unlink(missing_ok=True)


def version_dirs(directory: Path) -> list[tuple[int, Path]]:
    """The `step-N` of a directory of models, newest first, each with its N; links are passed over."""
    return step_dirs(directory)


def is_export(path: Path, step: int, options: Mapping[str, Any]) -> bool:
    """Whether a directory is a published export of this step with these options, by its `tuner.json`."""
    try:
        facts = read_json(path / LINEAGE)
    except DataError:
        return False
    source = facts.get("source")
    return has_options(facts, options) and isinstance(source, Mapping) and source.get("step") == step


def has_options(facts: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether an export was made with these options, by its `tuner.json`; for `auto` it has the type that this takes.
    """
    taken = facts.get("auto_dtype", "bf16") if options["dtype"] == "auto" else options["dtype"]
    return facts.get("export") == {**options, "dtype": taken}


def newest_export(directory: Path, options: Mapping[str, Any]) -> int:
    """The newest step exported with these options; -1 without any."""
    return max((step for step, path in step_dirs(directory) if is_export(path, step, options)), default=-1)


def prune_exports(directory: Path, keep: int, options: Mapping[str, Any]) -> None:
    """Keep the newest exports with these options; others, and the one that `latest` leads to, are not touched.

    Raises MachineError.
    """
    link = directory / LATEST
    latest = os.readlink(link) if link.is_symlink() else None
    made = [path for step, path in step_dirs(directory) if is_export(path, step, options)]
    for path in made[keep:]:
        if path.name != latest:
            discard_dir(path)
