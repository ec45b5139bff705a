"""Durations: a count and its unit, such as `3 epochs`, `2B tokens`, `10%`, `15 min`; and the recipe's types of them.

Steps by number, too: one, or a range with both ends, such as `300-310`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from tuner.config.numbers import parse_number, write_number
from tuner.config.value_types import NEVER, ValueType, shown

Unit = Literal["epochs", "steps", "tokens", "%", "documents", "layers", "windows", "s", "min", "h"]

COUNTED: tuple[Unit, ...] = ("epochs", "steps", "tokens", "documents", "layers", "windows")
WORDS: dict[str, Unit] = {
    **{word: unit for unit in COUNTED for word in (unit, unit.removesuffix("s"))},
    "%": "%", "s": "s", "sec": "s", "second": "s", "seconds": "s",
    "min": "min", "minute": "min", "minutes": "min", "h": "h", "hour": "h", "hours": "h",
}  # fmt: skip
SECONDS: dict[str, int] = {"s": 1, "min": 60, "h": 3600}
WHOLE: frozenset[str] = frozenset(COUNTED[1:])

MOST_STEPS = 2**53
_STEP_RANGE = re.compile(r"\s*(\d{1,16})\s*-\s*(\d{1,16})\s*")
_SPLIT = re.compile(r"(.*?)\s*(%|(?<![A-Za-z])[a-z]+|(?<=[KMBGTi])[a-z]+)", re.DOTALL)


@dataclass(frozen=True)
class Duration:
    """How long: `count` of `unit`; a percentage keeps its count (`10%` is 10 of `%`)."""

    count: Fraction
    unit: Unit

    @classmethod
    def parse(cls, text: str | int | float, units: Sequence[str] | None = None) -> Duration:
        """Read `500 steps`; ValueError for a bare number, an unknown unit, a count of 0 or less."""
        allowed = tuple(units or sorted(set(WORDS.values())))
        written = str(text).strip()
        if not written.endswith("%") and (question := bare_number(text, allowed)) is not None:
            raise ValueError(question)
        match = _SPLIT.fullmatch(written)
        unit = WORDS.get(match[2]) if match else None
        if match is None or unit is None or unit not in allowed:
            raise ValueError(f"got {written!r}; allowed: a count with a unit, such as {_alternatives('10', allowed)}")
        try:
            count = parse_number(match[1])
        except ValueError:
            raise ValueError(f"got {written!r}: {match[1]!r} is not a number; allowed: such as "
                             f"{_alternatives('10', allowed)}") from None  # fmt: skip
        if count <= 0:
            raise ValueError(f"got {written!r}; allowed: a count above 0")
        if unit in WHOLE and count.denominator != 1:
            raise ValueError(f"got {written!r}; allowed: a whole number of {unit}")
        if unit == "%" and count > 100:
            raise ValueError(f"got {written!r}; allowed: at most 100%")
        return cls(count, unit)

    @property
    def seconds(self) -> float:
        """The length in seconds; ValueError for a unit that is not a time."""
        if self.unit not in SECONDS:
            raise ValueError(f"{self} is not a time")
        return float(self.count * SECONDS[self.unit])

    @property
    def share(self) -> Fraction:
        """The fraction (0 to 1) that a percentage stands for; ValueError for another unit."""
        if self.unit != "%":
            raise ValueError(f"{self} is not a percentage")
        return self.count / 100

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{write_number(self.count)}%"
        word = self.unit[:-1] if self.count == 1 and self.unit.endswith("s") and len(self.unit) > 1 else self.unit
        return f"{write_number(self.count)} {word}"


def bare_number(value: str | int | float, units: Sequence[str]) -> str | None:
    """What to ask about a number without a unit; None for what is no number. A share of the run is written as percent.

    Between 0 and 1 only a share or epochs can be meant: 0.03 is 3%, and 0.03 steps would be a mistake of its own.
    """
    try:
        count = parse_number(value)
    except ValueError:
        return None
    written = str(value).strip()
    if 0 < count < 1 and ("%" in units or "epochs" in units):
        meant = f"{write_number(count * 100)}%" if "%" in units else f"{written} epochs"
        return f"{written} what? did you mean {meant}?"
    return f"{written} what? write {_alternatives(written, units)}"


def _alternatives(count: str, units: Sequence[str]) -> str:
    written = [f"{count}%" if unit == "%" else f"{count} {unit}" for unit in units]
    return written[0] if len(written) == 1 else f"{', '.join(written[:-1])} or {written[-1]}"


@dataclass(frozen=True)
class Span(ValueType):
    """One duration in one of `units`."""

    metavar = "DURATION"
    units: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a duration ({' | '.join(self.units)})"

    def read(self, value: Any) -> Duration:
        """Return the duration."""
        if isinstance(value, Duration):
            value = str(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}, such as 10 {self.units[0]}")
        return Duration.parse(value, self.units)

    def plain(self, value: Any) -> Any:
        """Return the duration's text."""
        return None if value is None else str(value)

    def schema(self) -> dict[str, Any]:
        """A count and a unit."""
        return {"type": "string", "description": self.what, "pattern": r"^\S.*$"}


@dataclass(frozen=True)
class CadenceSpan(Span):
    """One duration or a list of them, whichever comes first; `never` turns it off."""

    aliases: tuple[tuple[str, Any], ...] = NEVER

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a duration or a list of durations ({' | '.join(self.units)})"

    def read(self, value: Any) -> tuple[Duration, ...]:  # type: ignore[override]
        """Return the durations."""
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            raise ValueError("got an empty list; to turn it off write never")
        return tuple(Span(units=self.units).read(item) for item in items)

    def plain(self, value: Any) -> Any:
        """Return one text, or a list of them."""
        if value is None:
            return None
        return str(value[0]) if len(value) == 1 else [str(item) for item in value]

    def schema(self) -> dict[str, Any]:
        """A duration or a list of durations."""
        one = {"type": "string", "pattern": r"^\S.*$"}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}], "description": self.what}


@dataclass(frozen=True)
class StepRange:
    """The steps from ``first`` to ``last``, both included, counted from 1."""

    first: int
    last: int

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def is_among(step: int, ranges: Sequence[StepRange]) -> bool:
    """Whether a step lies in any of these ranges."""
    return any(step in steps for steps in ranges)


@dataclass(frozen=True)
class Steps(ValueType):
    """One step, or a range of them with both ends."""

    metavar = "STEPS"

    what = "a step such as 120, or a range of steps such as 300-310"

    def read(self, value: Any) -> StepRange:
        """Return the range."""
        if isinstance(value, StepRange):
            return value
        if isinstance(value, str) and (match := _STEP_RANGE.fullmatch(value)):
            first, last = int(match[1]), int(match[2])
        elif isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
            first = last = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            first = last = value
        else:
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}")
        if not 1 <= first <= MOST_STEPS or last > MOST_STEPS:
            raise ValueError(f"got {shown(value)}; steps are counted from 1")
        if last < first:
            raise ValueError(f"got {shown(value)}; write the first step before the last: {last}-{first}")
        return StepRange(first, last)

    def plain(self, value: Any) -> Any:
        """Return the step, or the range as text."""
        return value.first if value.first == value.last else str(value)

    def schema(self) -> dict[str, Any]:
        """A step, or a range as text."""
        whole = {"type": "integer", "minimum": 1}
        return {"anyOf": [whole, {"type": "string", "pattern": r"^\s*\d+(\s*-\s*\d+)?\s*$"}]}
