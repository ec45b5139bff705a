"""Runs as they are on disk."""

from pathlib import Path
from typing import Any

from tuner.api.given import absolute
from tuner.rundir.record import Run, find_runs, read_run, summary


def runs(directory: str | Path = "runs") -> list[Run]:
    """The runs at or below a directory, oldest first; those whose record cannot be read are left out."""
    return find_runs(absolute(directory))[0]


def show_run(run: str | Path) -> dict[str, Any]:
    """A run's figures as `tuner runs show` gives them: status, steps, losses, tokens, seconds."""
    return summary(read_run(absolute(run, "look")))
