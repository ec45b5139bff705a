"""The section `data.windows`: training data that is read in parts, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from tuner.config.duration import Duration, Span
from tuner.config.numbers import Whole
from tuner.config.section import Bool, Effect, Section
from tuner.config.value_types import NEVER, Several, Text, Word, refuse

PLACE = "{window}"
"""What the name of a window replaces in the paths of data.train."""


def _no_name_twice(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise refuse(f"got {twice[0]!r} twice")
    return names


NAMES = Several(item=Text(kind="names", pattern=r"[^/\x00]*[^/\x00.][^/\x00]*"), empty=True)


class WindowsSection(Section):
    """Training data in windows: each is prepared, trained, evaluated and saved before the next one begins."""

    files: Annotated[int | None, Whole(ge=1, le=2**31)] = None
    """Train in windows of so many files of each source, in the order of their names; null: not by count."""
    names: Annotated[tuple[str, ...], NAMES, AfterValidator(_no_name_twice)] = ()
    """Train in windows by name, in this order: each takes the place of {window} in the paths of data.train."""
    grow: Bool = False
    """With files: more files may come, until one called END lies next to them, or the run has its steps."""
    wait: Annotated[Duration | None, Span(units=("s", "min", "h"), aliases=NEVER)] = Duration.parse("10 min")
    """How long a window that is not there yet is waited for once training needs it; never: not at all."""
    late: Word[Literal["stop", "skip"]] = "stop"
    """What follows then: stop, so that the run can be resumed (exit code 75), or skip it for good (names only)."""
    empty: Word[Literal["skip", "wait", "refuse"]] = "skip"
    """A window without a row: skip it for good, wait for it as for one that is late, or refuse it (exit code 3)."""

    on_resume: ClassVar[Mapping[str, Effect]] = {"wait": "safe", "late": "safe", "empty": "safe"}

    @property
    def is_on(self) -> bool:
        """Whether there are windows at all."""
        return self.files is not None or bool(self.names)
