"""Exact human numbers: `4K`, `1.25M`, `3e-5`, `10%`, `2^20`, `16Ki`, `5GB`, `64GiB`; and the recipe's types of them.

Durations, too: a count and its unit, such as `3 epochs`, `2B tokens`, `10%`, `15 min`; and steps by number: one, or a
range with both ends, such as `300-310`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Literal, Self, get_args

from tuner.config.value_types import NEVER, ValueType, meant, shown

DECIMAL_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BINARY_SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
BYTE_SUFFIXES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{suffix}B": factor for suffix, factor in BINARY_SUFFIXES.items()
}
MAX_CHARACTERS = 64
MAX_EXPONENT = 400

_EXACT = Context(prec=2 * MAX_EXPONENT + MAX_CHARACTERS)
"""With the digits of any number that can be written and has an end."""
_POWER = re.compile(r"(\d{1,4})\^(\d{1,4})")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?)\s*([A-Za-z]{1,3}|%)?")


def parse_number(value: str | int | float | Fraction) -> Fraction:
    """Return the exact value that was written; ValueError for booleans, inf, nan and anything else."""
    return _parse(value, DECIMAL_SUFFIXES | BINARY_SUFFIXES)


def parse_bytes(text: str | int) -> int:
    """Return a size in whole bytes (`5GB`, `23.7GiB`, `16Ki`, `4096`); ValueError where it is less than one.

    What is written with a unit is rounded down; a number without one is refused unless it is whole.
    """
    count = _parse(text, DECIMAL_SUFFIXES | BINARY_SUFFIXES | BYTE_SUFFIXES)
    has_unit = isinstance(text, str) and text.strip()[-1:].isalpha()
    if count < 1 or (count.denominator != 1 and not has_unit):
        raise ValueError(f"{text} is not a whole number of bytes")
    return int(count)


def byte_text(count: int) -> str:
    """The shortest text that reads back as this many bytes: `5GB`, `64GiB`, `4097B`."""
    factor, suffix = max((factor, suffix) for suffix, factor in BYTE_SUFFIXES.items() if count % factor == 0)
    return f"{count // factor}{suffix}"


def _parse(value: str | int | float | Fraction, suffixes: dict[str, int]) -> Fraction:
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        return Fraction(repr(value))
    text = value.strip()
    if len(text) > MAX_CHARACTERS or not text.isascii():
        raise ValueError("not a number")
    if power := _POWER.fullmatch(text):
        return Fraction(int(power[1]) ** min(int(power[2]), MAX_EXPONENT + 1))
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError("not a number")
    digits, suffix = match[1], match[2]
    exponent = re.search(r"[eE]([+-]?\d+)", digits)
    if exponent and abs(int(exponent[1])) > MAX_EXPONENT:
        raise ValueError("too large or too small a number")
    number = Fraction(digits)
    if suffix is None:
        return number
    if suffix == "%":
        return number / 100
    if suffix not in suffixes:
        raise ValueError(f"unknown suffix {suffix}")
    return number * suffixes[suffix]


def write_number(value: Fraction) -> str:
    """Write an exact number without loss: whole, decimal where one exists, else the shortest float."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = _EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{decimal:f}" if Fraction(decimal) == value else repr(float(value))


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
        bounds = ((ge, self.ge), (gt, self.gt), (le, self.le), (lt, self.lt))
        inside = all(bound is None or holds(number, bound) for holds, bound in bounds)
        if not inside and 1 < number <= 100 and 1 in (self.le, self.lt):
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}; did you mean {shown(value)}%?")
        if not inside:
            raise TypeError
        return number

    def schema(self) -> dict[str, Any]:
        """A number, or a human number as text."""
        names = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le, "exclusiveMaximum": self.lt}
        bounds = {name: bound for name, bound in names.items() if bound is not None}
        return {"anyOf": [{"type": "number"} | bounds, {"type": "string", "pattern": r"^[+-]?[\d.].*$"}]}


@dataclass(frozen=True)
class Rate(Real):
    """A learning rate: at most 1, and no share, of which a larger number would be meant in percent."""

    gt: float | None = 0
    le: float | None = 1

    def read(self, value: Any) -> float:
        """As a number is read."""
        if (number := Real(gt=0).read(value)) > 1:
            raise TypeError
        return number


@dataclass(frozen=True)
class WeightedWords(ValueType):
    """Words of a `Literal` with their weights, numbers above 0; one word by itself has the weight 1."""

    metavar = "WORD"

    def of(self, annotation: Any) -> Self:
        """The value type of a field with this annotation, a mapping."""
        return replace(self, values=get_args(get_args(annotation)[0]))

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"{' or '.join(self.values)}, or a mapping of them to weights above 0"

    def read(self, value: Any) -> dict[str, float]:
        """Return the weights by word."""
        if isinstance(value, str):
            value = {value: 1}
        if not isinstance(value, Mapping) or not value:
            raise TypeError
        for word in value:
            if word not in self.values:
                raise ValueError(f"got {shown(word)}; allowed: {self.allowed}{meant(word, self.values)}")
        return {word: self._weight(word, weight) for word, weight in value.items()}

    def _weight(self, word: str, weight: Any) -> float:
        try:
            return _WEIGHT.read(weight)
        except TypeError:
            raise ValueError(f"got {shown(weight)} for {word}; allowed: {_WEIGHT.what}") from None

    def plain(self, value: Any) -> Any:
        """Return the word, or the mapping."""
        return next(iter(value)) if list(value.values()) == [1] else dict(value)

    def schema(self) -> dict[str, Any]:
        """A word, or an object of numbers."""
        weights = dict.fromkeys(self.values, _WEIGHT.schema())
        mapping = {"type": "object", "properties": weights, "additionalProperties": False, "minProperties": 1}
        return {"anyOf": [{"enum": list(self.values)}, mapping]}


_WEIGHT = Real(gt=0)


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
        return str(value)

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
