"""Links among the names of a run directory: none is followed, since one may lead anywhere, and be written through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tuner.errors import DataError
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, LATEST, NAMES

_DEPTH = 3
"""Down to `evaluations/step-N/TASK.jsonl`."""
_CLOSED = frozenset({CHECKPOINTS, EXPORTS})
"""Whose entries hold files that are checked one by one where they are read."""


def require_no_links(run_dir: Path) -> None:
    """Check that no name that a run writes or reads is a link. Raises DataError for the first that is one.

    The link `exports/latest` is a run's own, and leads to its neighbour.
    """
    for name in sorted(NAMES):
        path = run_dir / name
        if path.is_symlink():
            raise _refused(path)
        for link in _links_in(path, 1 if name in _CLOSED else _DEPTH):
            raise _refused(link)


def _links_in(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # not there, no directory, or not to be read: which is said where it is needed
        return
    for entry in entries:
        path = directory / entry.name
        if entry.is_symlink():
            if not (
                entry.name == LATEST and directory.name == EXPORTS and Path(os.readlink(path)).name == os.readlink(path)
            ):
                yield path
        elif depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _links_in(path, depth - 1)


def _refused(path: Path) -> DataError:
    return DataError(
        f"{path}: a link, to {os.readlink(path)}: links in a run directory are never followed",
        hint="put what it leads to in its place; to have a run on another disk, set output_dir",
    )
