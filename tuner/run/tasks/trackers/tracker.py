"""What a tracker is, and what it is given."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tuner.config.recipe import LoggingSection
from tuner.run.tasks.hooks import RunFacts
from tuner.rundir.records import Records


@dataclass(frozen=True)
class TrackedPoint:
    """One line of metrics.jsonl as numbers by name (`train/loss`), with the time it was seen (seconds since 1970)."""

    kind: str
    step: int
    values: Mapping[str, float]
    time_s: float


@dataclass(frozen=True)
class TrackedRun:
    """The run as trackers name it, and what the recipe says of them."""

    facts: RunFacts
    logging: LoggingSection

    @property
    def name(self) -> str:
        """What it is shown as."""
        return str(self.facts.recipe["name"])

    @property
    def first_new_step(self) -> int:
        """Steps from here on are taken, and sent, again by this launch: 0 from the start, else the resumed step + 1."""
        return self.facts.from_step + 1 if self.facts.from_step else 0


class Tracker(Protocol):
    """An open connection to one tracker's run. Any exception that a method raises means that nothing was taken."""

    @property
    def id(self) -> str:
        """What a later launch needs to resume the same run."""

    @property
    def place(self) -> str:
        """Where the run can be looked at, for people."""

    def held(self) -> Mapping[str, int] | None:
        """The newest step of each kind of line that the tracker itself holds; None where it cannot say."""

    def send(self, points: Sequence[TrackedPoint]) -> None:
        """Take points in the order of their steps, and keep them even if this process is killed right after."""

    def close(self, status: str) -> None:
        """The launch ended: finished, stopped or failed."""


def point_of(line: Mapping[str, Any]) -> TrackedPoint:
    """The numbers of a line, those of nested mappings joined with `/`; the line's kind comes first in each name."""
    kind, step = str(line["kind"]), int(line["step"])
    return TrackedPoint(kind, step, dict(_numbers(line, kind)), time.time())


def points_of_file(path: Path) -> list[TrackedPoint]:
    """All points of a metrics.jsonl; none where there is no file."""
    return [point_of(line) for line in Records(path).read()]


def _numbers(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, (int, float)) and key != "step":
            yield f"{prefix}/{key}", float(value)
