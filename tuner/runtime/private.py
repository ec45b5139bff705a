"""Names that a library does not promise: looked up when they are used, so that one that is gone is told as such."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from tuner.errors import MachineError


@dataclass(frozen=True)
class Need:
    """What a private name is for: what needs it, and what works without."""

    by: str
    still_works: str


def private_name(path: str, need: Need) -> Any:
    """What a library has under a dotted path. Raises MachineError where it has no such name (any more)."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _gone(path, need) from error


def private_attribute(owner: Any, name: str, need: Need) -> Any:
    """An attribute of a library's object or class. Raises MachineError where it has it no more."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        kind = owner if isinstance(owner, type) else type(owner)
        raise _gone(f"{kind.__module__}.{kind.__qualname__}.{name}", need) from error


def _gone(path: str, need: Need) -> MachineError:
    library = path.partition(".")[0]
    return MachineError(
        f"{library} {version(library)} has no {path}, which {need.by} needs; {need.still_works}",
        hint=f"install a tested version of {library}: docs/versions.md",
    )
