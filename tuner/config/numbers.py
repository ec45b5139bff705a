"""Exact human numbers: `4K`, `1.25M`, `3e-5`, `10%`, `2^20`, `16Ki`, `5GB`, `64GiB`; and the recipe's types of them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any, Self, get_args

from tuner.config.value_types import ValueType, meant, shown

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
    values: tuple[str, ...] = ()

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
