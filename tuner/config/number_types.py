"""The value types of a recipe that are numbers: whole ones, real ones, sizes in bytes and counts of skips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tuner.config.numbers import byte_text, parse_bytes, parse_number
from tuner.config.value_types import ValueType, shown


@dataclass(frozen=True)
class Whole(ValueType):
    """A whole number; `4K`, `2^20` and `16Ki` are understood."""

    metavar = "COUNT"
    ge: int = 0
    le: int | None = None

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        bound = f"from {self.ge} to {self.le}" if self.le is not None else f"at least {self.ge}"
        return f"a whole number, {bound}"

    def read(self, value: Any) -> int:
        """Return the exact integer."""
        number = _number(value)
        if number.denominator != 1 or number < self.ge or (self.le is not None and number > self.le):
            raise TypeError
        return int(number)

    def schema(self) -> dict[str, Any]:
        """An integer, or a human number as text."""
        bounds = {"minimum": self.ge} | ({"maximum": self.le} if self.le is not None else {})
        return {"anyOf": [{"type": "integer"} | bounds, {"type": "string", "pattern": r"^\d.*$"}]}


@dataclass(frozen=True)
class Real(ValueType):
    """A finite number between bounds."""

    metavar = "NUMBER"
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        names = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        return ", ".join(["a number", *(f"{name} {bound:g}" for name, bound in names if bound is not None)])

    def read(self, value: Any) -> float:
        """Return the nearest float to the exact number."""
        try:
            number = float(_number(value))
        except OverflowError:
            raise TypeError from None
        inside = (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )
        if not inside:
            raise TypeError
        return number

    def schema(self) -> dict[str, Any]:
        """A number, or a human number as text."""
        names = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le, "exclusiveMaximum": self.lt}
        bounds = {name: bound for name, bound in names.items() if bound is not None}
        return {"anyOf": [{"type": "number"} | bounds, {"type": "string", "pattern": r"^[+-]?[\d.].*$"}]}


@dataclass(frozen=True)
class Bytes(ValueType):
    """A whole number of bytes, such as 5GB or 4GiB."""

    what = "a size such as 5GB, 500MB or 4GiB"

    def read(self, value: Any) -> int:
        """Return the bytes."""
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise TypeError
        try:
            return parse_bytes(value)
        except ValueError:
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}") from None

    def plain(self, value: Any) -> Any:
        """Return the shortest text that says it exactly."""
        return byte_text(value)

    def schema(self) -> dict[str, Any]:
        """A count, or a count and a unit."""
        return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[\d.].*$"}]}


@dataclass(frozen=True)
class Skips(ValueType):
    """`stop`, which is none, or `{skip: N}`: how many there may be."""

    aliases: tuple[tuple[str, Any], ...] = (("stop", 0),)

    what = "{skip: 3}"

    def read(self, value: Any) -> int:
        """Return the number."""
        if not isinstance(value, Mapping) or set(value) != {"skip"}:
            raise TypeError
        return Whole(ge=1, le=10**6).read(value["skip"])

    def plain(self, value: Any) -> Any:
        """Return the mapping."""
        return {"skip": value}

    def schema(self) -> dict[str, Any]:
        """An object with one key."""
        count = {"type": "integer", "minimum": 1}
        return {"type": "object", "properties": {"skip": count}, "required": ["skip"], "additionalProperties": False}


def _number(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    try:
        return parse_number(value)
    except ValueError:
        raise TypeError from None
