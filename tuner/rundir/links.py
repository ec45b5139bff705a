"""Links among the names of a run directory: none is followed, since one may lead anywhere, and be written through.

Pipes and devices are refused likewise.
"""

import os
from pathlib import Path

from tuner.errors import DataError
from tuner.rundir.exports import UNFINISHED_LINK
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, LATEST, NAMES

_DEPTH = 3
"""Down to `evaluations/step-N/TASK.jsonl`."""
_CLOSED = frozenset({CHECKPOINTS, EXPORTS})
"""Whose entries hold files that are checked one by one where they are read."""


def require_no_links(run_dir: Path) -> None:
    """Check that no name that a run writes or reads is a link, a pipe or a device. DataError for the first that is one.

    The link `exports/latest` is a run's own, and leads to its neighbour.
    """
    for name in sorted(NAMES):
        path = run_dir / name
        _require_plain(path)
        _check_below(path, 1 if name in _CLOSED else _DEPTH)


def _check_below(directory: Path, depth: int) -> None:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # not there, no directory, or not to be read: which is said where it is needed
        return
    for entry in entries:
        path = directory / entry.name
        if entry.is_dir(follow_symlinks=False):
            if depth > 1:
                _check_below(path, depth - 1)
        elif not entry.is_file(follow_symlinks=False) and not _is_latest(path):
            _require_plain(path)


def _is_latest(path: Path) -> bool:
    """Whether it is the link from the newest export's second name to its first, or one that was not yet renamed so."""
    is_named = path.name == LATEST or path.name.startswith(UNFINISHED_LINK)
    if not is_named or path.parent.name != EXPORTS or not path.is_symlink():
        return False
    return Path(os.readlink(path)).name == os.readlink(path)


def _require_plain(path: Path) -> None:
    """Check that a path is a file, a directory or nothing. Raises DataError."""
    if path.is_symlink():
        raise DataError(
            f"{path}: a link, to {os.readlink(path)}: links in a run directory are never followed",
            hint="put what it leads to in its place; to have a run on another disk, set output_dir",
        )
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening one may wait for ever
        raise DataError(f"{path}: neither a file nor a directory", hint="remove it: no run makes one")
