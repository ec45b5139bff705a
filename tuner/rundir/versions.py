"""`teachers.json` and `bank.json`: the versions that a run has taken of models which others still train, and how far it
has looked for newer ones.

What they say of a step is final once it is written, which is before the step after it: a run that is killed and resumed
takes the same versions in the same steps, whatever newer ones there are by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tuner.errors import DataError
from tuner.rundir.layout import BANK, TEACHERS
from tuner.rundir.run_json import read_noted
from tuner.runtime.files import write_json

SCHEMA = {TEACHERS: "tuner.teachers/1", BANK: "tuner.bank/1"}


@dataclass(frozen=True)
class TakenVersion:
    """A version of a model, and from where on the run has it."""

    step: int
    """The steps that were taken before its first one."""
    name: str
    """Of its directory in that of all versions; of a source of weights its path."""
    sha256: str
    """Over its weights; empty until they are read."""

    def require(self, path: Path) -> Path:
        """Its directory, at ``path``. Raises DataError where it is gone."""
        if not path.is_dir():
            raise DataError(
                f"{path} is gone, which the run took after step {self.step}",
                hint="restore it, and have its run keep as many (checkpoint.keep, export.keep) as the checkpoints "
                "reach back; or start a new run with --name",
            )
        return path


@dataclass(frozen=True)
class TakenVersions:
    """The versions of one model in the order of their steps, at least one."""

    entries: tuple[TakenVersion, ...]
    looked: int
    """The last step after which a newer one was looked for."""

    def at(self, step: int) -> TakenVersion:
        """The version of the step after ``step``."""
        return max((entry for entry in self.entries if entry.step <= step), key=lambda entry: entry.step)

    def until(self, step: int) -> TakenVersions:
        """What was known of them after ``step``."""
        return TakenVersions(tuple(entry for entry in self.entries if entry.step <= step), min(self.looked, step))

    def having(self, version: TakenVersion) -> TakenVersions:
        """With this one at its step."""
        others = (entry for entry in self.entries if entry.step != version.step)
        return replace(self, entries=tuple(sorted((*others, version), key=lambda entry: entry.step)))

    def looked_after(self, step: int) -> TakenVersions:
        """Now that a newer one was looked for after ``step``."""
        return replace(self, looked=max(self.looked, step))

    def as_plain(self) -> dict[str, Any]:
        """The versions as JSON values, in a run's file and in a checkpoint's JSON state."""
        return {"versions": [asdict(entry) for entry in self.entries], "looked": self.looked}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> TakenVersions:
        """The versions that such values stand for. Raises KeyError, TypeError."""
        return TakenVersions(tuple(TakenVersion(**entry) for entry in plain["versions"]), int(plain["looked"]))


def read_teachers(run_dir: Path) -> TakenVersions | None:
    """The versions of a run's teacher so far; None where it has written none. Raises DataError."""
    return _read(run_dir / TEACHERS).get("")


def write_teachers(run_dir: Path, teachers: TakenVersions) -> None:
    """Replace `teachers.json`. Raises MachineError."""
    write_json(run_dir / TEACHERS, {"schema": SCHEMA[TEACHERS], **teachers.as_plain()})


def read_bank(run_dir: Path) -> dict[int, TakenVersions]:
    """The versions of a run's sources of weights so far, by their numbers in `model.init_from`. Raises DataError."""
    return {int(number): versions for number, versions in _read(run_dir / BANK).items()}


def write_bank(run_dir: Path, bank: Mapping[int, TakenVersions]) -> None:
    """Replace `bank.json`. Raises MachineError."""
    sources = {str(number): versions.as_plain() for number, versions in bank.items()}
    write_json(run_dir / BANK, {"schema": SCHEMA[BANK], "sources": sources})


def _read(path: Path) -> dict[str, TakenVersions]:
    """By the names of their models; that of a file of one model is empty. Nothing where there is no file."""
    if not path.is_file():
        return {}

    def by_names(content: Mapping[str, Any]) -> dict[str, TakenVersions]:
        return {name: TakenVersions.of(plain) for name, plain in content.get("sources", {"": content}).items()}

    return read_noted(path, SCHEMA[path.name], by_names, "versions")
