"""Training data that come in portions, one after the other: what a section of `data` says of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tuner.config.numbers import Duration
from tuner.config.section import Section

if TYPE_CHECKING:
    from tuner.config.recipe import DataSource

ListFiles = Callable[["DataSource", bool], list[str]]
"""The files of a source in the order of their names. With True they must be there: it raises DataError."""


@dataclass(frozen=True)
class Portion:
    """Some files of the sources under a name, those of the first source first."""

    name: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Late:
    """The next portion is not there yet: its name, where it has one by now, and what is missing."""

    name: str
    missing: str


class PortionsSection(Section):
    """A section of `data` that divides the sources: a run trains on one portion, then on the next one.

    Nothing below the recipe asks which section it is. A new one is a key of `data`, and a part of the launch that opens
    its portions (``run/parts``).
    """

    noun: ClassVar[str] = "portion"
    """What people call one of them; its plural is the section's key."""

    @abstractmethod
    def next_portion(
        self, sources: Sequence[DataSource], done: Sequence[Portion], files: ListFiles, passes: int | None = 1
    ) -> Portion | Late | None:
        """The portion after those that are done or left out, in so many ``passes`` over all (None: any number).

        None where there are no more. Raises DataError.
        """

    def passes_in(self, duration: Duration) -> int | None:
        """How often a run of this duration goes over all portions; None: as often as its steps want."""
        return 1

    def sources_of(self, sources: tuple[DataSource, ...], name: str) -> tuple[DataSource, ...]:
        """The sources as a portion's name has them."""
        return sources

    def may_come_later(self, source: DataSource) -> bool:
        """Whether a launch may begin before a source has any file."""
        return False
