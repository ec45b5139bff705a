"""Removing runs: renamed to a trash name first, and never one that is in use or that is something else."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tuner.errors import RecipeError
from tuner.rundir.record import read_run
from tuner.rundir.run_json import hold
from tuner.runtime.files import discard_dir


def remove_runs(paths: Sequence[Path]) -> list[Path]:
    """Remove run directories, all of them or, where one must not be, none; returns their paths.

    Raises RecipeError for a path that is no run, or a link to one; DataError for one whose record is damaged;
    MachineError for one that is in use, naming its holder.
    """
    unique = list(dict.fromkeys(paths))
    with ExitStack() as locks:
        for path in unique:
            if path.is_symlink():
                raise RecipeError(f"{path} is a link", hint=f"name the run itself: {path.resolve()}")
            read_run(path)
            locks.enter_context(hold(path))
        for path in unique:
            discard_dir(path)
    return unique
