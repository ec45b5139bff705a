"""The names of checkpoint directories."""

from __future__ import annotations

import re
from pathlib import Path

STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})", flags=re.ASCII)


def step_name(step: int) -> str:
    """The directory of a step: `step-120`."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return f"step-{step}"


def step_dirs(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """All `step-N` directories, valid or not, newest first; links and other names are passed over."""
    if not checkpoints_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in checkpoints_dir.iterdir()
        if (match := STEP.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, reverse=True)
