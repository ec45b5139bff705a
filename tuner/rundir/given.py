"""What a run was given before its first step, as its checkpoints note it (`model.init_from`), in words."""

from collections.abc import Mapping
from typing import Any

from tuner.errors import counted

SHOWN_DIGITS = 16


def sources_of(meta: Mapping[str, Any]) -> list[str]:
    """A line for each place that a checkpoint's run began with weights of; none where it is its base model alone."""
    noted = meta.get("init_from")
    entries = noted.get("entries", ()) if isinstance(noted, Mapping) else ()
    return [_line(entry) for entry in entries]


def _line(entry: Mapping[str, Any]) -> str:
    step = "" if entry.get("step") is None else f", step {entry['step']}"
    digest = str(entry["sha256"])[:SHOWN_DIGITS]
    return f"{entry['kind']} {entry['path']}{step}: {counted(entry['tensors'], 'tensor')}, sha256 {digest}"
