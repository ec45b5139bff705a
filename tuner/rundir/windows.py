"""`windows.json`: the windows of a run's data in their order, as it opened them or left them out.

A line of it is final once it is written, which is before the first step on a window: a run that is killed and resumed
comes upon the same windows with the same rows, whatever lies in the sources by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tuner.rundir.layout import PORTIONS
from tuner.rundir.run_json import read_noted
from tuner.runtime.files import write_json

SCHEMA = "tuner.windows/1"
LeftOut = Literal["", "late", "empty"]


@dataclass(frozen=True)
class WindowEntry:
    """A window of a run: its prepared data and where it begins, or why it was left out."""

    name: str
    files: tuple[str, ...] = ()
    left_out: LeftOut = ""
    key: str = ""
    """That of its prepared data."""
    rows: int = 0
    first_step: int = 0
    """The steps that were taken before its first one."""
    last_step: int = 0
    """The number of its last one."""

    def as_state(self) -> dict[str, Any]:
        """The entry in `windows.json` and in a checkpoint's JSON state."""
        return {**asdict(self), "files": list(self.files)}


@dataclass(frozen=True)
class WindowPosition:
    """Where a run is among its windows: those that it opened or left out, and which of them is open."""

    entries: tuple[WindowEntry, ...]
    """In their order; those after the current one are known from a launch that had come further."""
    number: int
    """Of the current one, from 0."""
    ended: bool = False
    """Whether it was the last one, and is done."""

    @property
    def current(self) -> WindowEntry:
        """The window that is trained."""
        return self.entries[self.number]

    @property
    def decided(self) -> tuple[WindowEntry, ...]:
        """The windows up to the current one."""
        return self.entries[: self.number + 1]

    def as_plain(self) -> dict[str, Any]:
        """The position as JSON values."""
        return {**asdict(self), "entries": [entry.as_state() for entry in self.entries]}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> WindowPosition:
        """The position that such values stand for."""
        return WindowPosition(**{**plain, "entries": entries_of(plain["entries"])})

    def with_last_step(self, step: int) -> WindowPosition:
        """The same, with the number of the last step of the current window."""
        entries = list(self.entries)
        entries[self.number] = replace(self.current, last_step=step)
        return replace(self, entries=tuple(entries))


def entries_of(items: Sequence[Mapping[str, Any]]) -> tuple[WindowEntry, ...]:
    """The entries that `windows.json` or a checkpoint's state holds. Raises KeyError, TypeError."""
    return tuple(WindowEntry(**{**item, "files": tuple(item["files"])}) for item in items)


def read_windows(run_dir: Path) -> tuple[WindowEntry, ...]:
    """The windows of a run so far; none where it has written none. Raises DataError."""
    path = run_dir / PORTIONS
    if not path.is_file():
        return ()
    return read_noted(path, SCHEMA, lambda content: entries_of(content["windows"]), "windows")


def write_windows(run_dir: Path, entries: Sequence[WindowEntry]) -> None:
    """Replace `windows.json`. Raises MachineError."""
    write_json(run_dir / PORTIONS, {"schema": SCHEMA, "windows": [entry.as_state() for entry in entries]})
