"""`teachers.json`: the versions of its teacher that a run has learned from, and how far it has looked for newer ones.

What it says of a step is final once it is written, which is before the step after it: a run that is killed and resumed
learns from the same versions in the same steps, whatever newer ones there are by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.rundir.layout import TEACHERS
from tuner.rundir.run_json import read_noted
from tuner.runtime.files import write_json

SCHEMA = "tuner.teachers/1"


@dataclass(frozen=True)
class TeacherEntry:
    """A version of the teacher, and from where on the run learns from it."""

    step: int
    """The steps that were taken before its first one."""
    name: str
    """Of its directory in that of all versions."""
    sha256: str
    """Over its weights."""


@dataclass(frozen=True)
class Teachers:
    """The versions of a run's teacher in the order of their steps, at least one."""

    entries: tuple[TeacherEntry, ...]
    looked: int
    """The last step after which a newer one was looked for."""

    def at(self, step: int) -> TeacherEntry:
        """The version that the step after ``step`` learns from."""
        return max((entry for entry in self.entries if entry.step <= step), key=lambda entry: entry.step)

    def until(self, step: int) -> Teachers:
        """What was known of them after ``step``."""
        return Teachers(tuple(entry for entry in self.entries if entry.step <= step), min(self.looked, step))

    def as_plain(self) -> dict[str, Any]:
        """The versions as JSON values, in `teachers.json` and in a checkpoint's JSON state."""
        return {"versions": [asdict(entry) for entry in self.entries], "looked": self.looked}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Teachers:
        """The versions that such values stand for. Raises KeyError, TypeError."""
        return Teachers(tuple(TeacherEntry(**entry) for entry in plain["versions"]), int(plain["looked"]))


def read_teachers(run_dir: Path) -> Teachers | None:
    """The versions of a run's teacher so far; None where it has written none. Raises DataError."""
    path = run_dir / TEACHERS
    if not path.is_file():
        return None
    return read_noted(path, SCHEMA, Teachers.of, "teachers")


def write_teachers(run_dir: Path, teachers: Teachers) -> None:
    """Replace `teachers.json`. Raises MachineError."""
    write_json(run_dir / TEACHERS, {"schema": SCHEMA, **teachers.as_plain()})
