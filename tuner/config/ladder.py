"""The ladder section of the recipe: one recipe at several sizes, and the rules by which each size is trained.

A rule is a law: a number that follows from a model's parameters N, such as `327680 * (N / 108M)^(2/3)`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from tuner.config.numbers import DECIMAL_SUFFIXES, Duration, Real, Span, Whole, parse_number, write_number
from tuner.config.schedules import DecayShape
from tuner.config.section import Auto, Bool, Items, Rule, Section, table_rules
from tuner.config.value_types import Several, Table, Text, ValueType, once, refuse, shown
from tuner.errors import RecipeError

_NUMBER = r"[\d.]+(?:[eE][+-]?\d+)?[A-Za-z]{0,2}"
_EXPONENT = r"[+-]?[\d.]+(?:\s*/\s*\d+)?"
_LAW = re.compile(
    rf"\s*(?:(?P<by>{_NUMBER})\s*\*\s*)?"
    rf"(?:(?P<n>N)|\(\s*N\s*/\s*(?P<at>{_NUMBER})\s*\)\s*\^\s*(?:\(\s*(?P<to>{_EXPONENT})\s*\)|(?P<bare>[+-]?[\d.]+)))\s*"
)


@dataclass(frozen=True)
class PowerLaw:
    """`coefficient * (N / reference) ^ exponent` of a model's parameters N."""

    coefficient: Fraction
    reference: Fraction = Fraction(1)
    exponent: Fraction = Fraction(1)

    @classmethod
    def parse(cls, text: str | int | float) -> PowerLaw:
        """Read `20 * N`, `0.00235 * (N / 108M)^(-1/3)` or a number alone; ValueError for anything else."""
        match = _LAW.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return cls(_above_zero(text), Fraction(1), Fraction(0))
        by = Fraction(1) if match["by"] is None else _above_zero(match["by"])
        if match["n"]:
            return cls(by)
        return cls(by, _above_zero(match["at"]), _exponent(match["to"] or match["bare"]))

    def of(self, parameters: int) -> float:
        """The number for a model of so many parameters."""
        return float(self.coefficient) * math.pow(parameters / float(self.reference), float(self.exponent))

    def __str__(self) -> str:
        by = "" if self.coefficient == 1 else f"{_short(self.coefficient)} * "
        if self.exponent == 0:
            return _short(self.coefficient)
        if self.exponent == 1 and self.reference == 1:
            return f"{by}N"
        return f"{by}(N / {_short(self.reference)})^({self.exponent})"


@dataclass(frozen=True)
class Law(ValueType):
    """A law of a ladder."""

    metavar = "LAW"
    example: str = "20 * N"

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a law of the parameters N, such as {self.example}, or a number"

    def read(self, value: Any) -> PowerLaw:
        """Return the law."""
        if isinstance(value, PowerLaw):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise TypeError
        try:
            return PowerLaw.parse(value)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}") from None

    def plain(self, value: Any) -> Any:
        """Return the law's text."""
        return str(value)

    def schema(self) -> dict[str, Any]:
        """A text or a number."""
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^\S.*$"}]}


def short_count(count: float, figures: int = 3) -> str:
    """A count in so many figures, such as `104K`, `190M` or `1.3B`."""
    for suffix, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor * (1 - 0.5 / 10**figures):
            return f"{count / factor:.{figures}g}{suffix}"
    return f"{count:.{figures}g}"


def _above_zero(text: str | int | float) -> Fraction:
    number = parse_number(text)
    if number <= 0:
        raise ValueError("not above 0")
    return number


def _exponent(text: str) -> Fraction:
    above, _, below = text.partition("/")
    return parse_number(above.strip()) / (int(below) if below else 1)


def _short(number: Fraction) -> str:
    """An exact number as short as it can be written: `108M`, `0.00235`."""
    for suffix in ("T", "B", "M", "K"):
        scaled = number / DECIMAL_SUFFIXES[suffix]
        if scaled >= 1 and scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    return write_number(number)


_NAME = r"(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]*"
AsRecipe = Literal["recipe"]
"""Instead of a rule: what the recipe itself says."""


class LadderSize(Section):
    """A size of the ladder's model."""

    parameters: Annotated[int | None, Whole(ge=1000, le=10**13)] = None
    """Parameters without embeddings: width and depth follow, in the proportions of the model's config."""
    name: Annotated[str | None, Text(what="letters, digits, '.', '_' and '-' with a letter", pattern=_NAME)] = None
    """Name of the rung and of its run directory; null takes the count of parameters, such as 190M."""
    config: Annotated[dict[str, Any], Table()] = {}
    """In place of parameters: overrides of the model's config.json, e.g. {hidden_size: 512, num_hidden_layers: 8}."""
    micro_batch_size: Annotated[int | None, Whole(ge=1, le=2**20)] = None
    """Rows per forward and process at this size; null takes ladder.micro_batch_tokens."""
    min_processes: Annotated[int | None, Whole(ge=1, le=2**20)] = None
    """Processes that this size needs at least; null takes ladder.min_processes."""

    @model_validator(mode="after")
    def _one_way(self) -> LadderSize:
        if (self.parameters is None) == (not self.config):
            raise refuse("write either parameters, such as 190M, or config, such as {hidden_size: 512}")
        return self


def _ascending(multiples: tuple[float, ...]) -> tuple[float, ...]:
    if any(later <= earlier for earlier, later in pairwise(multiples)):
        raise refuse(f"got {list(multiples)}; allowed: numbers that grow, such as [0.5, 1, 2, 4]")
    return multiples


SIZES = Items(
    LadderSize, "a list of counts of parameters, such as [60M, 190M], or of {parameters, name, config, ...}",
    numbers=True,
)


class LadderSection(Section):
    """One recipe at several sizes, each trained by rules that follow from its parameters: `tuner ladder`."""

    sizes: Annotated[tuple[LadderSize, ...], SIZES, once(attrgetter("name"), "got the name {!r} twice")] = ()
    """Sizes: counts of parameters without embeddings, such as [60M, 190M], or {parameters, name, config, ...} each."""
    tokens: Annotated[PowerLaw, Law()] = PowerLaw.parse("20 * N")
    """Tokens of one multiple, by the parameters N without embeddings: 20 for each, as Chinchilla."""
    multiples: Annotated[
        tuple[float, ...], Several(item=Real(gt=0, le=10**6)), AfterValidator(_ascending)
    ] = (0.5, 1.0, 2.0, 4.0)  # fmt: skip
    """Ends of the periods of each run, as multiples of tokens; the last one is the run's length."""
    initial: Bool = False
    """Save and evaluate each size before its first step, too: the mark of step 0, which has the untrained weights."""
    decay: Annotated[Duration, Span(units=("%",))] = Duration.parse("10%")
    """Share of each period over which the learning rate falls to 0; it is saved and evaluated before and after that."""
    decay_shape: DecayShape = "linear"
    stepped: Bool = False
    """Lower the learning rate of each period that ends after one multiple by the square root of its multiple."""
    batch_tokens: Annotated[PowerLaw | AsRecipe, Law(example="327680 * (N / 108M)^(2/3)")] = PowerLaw.parse(
        "327680 * (N / 108M)^(2/3)"
    )
    """Tokens of a step to aim at, made whole numbers of rows, micro-batches and processes; or recipe."""
    lr: Annotated[PowerLaw | AsRecipe, Law(example="0.00235 * (N / 108M)^(-1/3)")] = PowerLaw.parse(
        "0.00235 * (N / 108M)^(-1/3)"
    )
    """Peak learning rate; or recipe."""
    warmup_tokens: Annotated[PowerLaw, Law(example="N")] = PowerLaw.parse("N")
    """Tokens of the linear warm-up."""
    beta2: Annotated[float | AsRecipe, Real(ge=0, lt=1)] = 0.95
    """Adam's second beta, with steps of small_batch_tokens or more; or recipe."""
    beta2_small_batch: Annotated[float, Real(ge=0, lt=1)] = 0.99
    """Adam's second beta with smaller steps."""
    small_batch_tokens: Annotated[int, Whole(ge=1, le=2**53)] = 524288
    """Tokens of a step from which on beta2 is used, and below which beta2_small_batch."""
    micro_batch_tokens: Annotated[int | Auto, Whole(ge=1, le=2**53)] = "auto"
    """Tokens per forward and process; auto: train.micro_batch_size, else on CUDA by size as on 80 GB, else one row."""
    min_processes: Annotated[int, Whole(ge=1, le=2**20)] = 1
    """Processes that each size gets at least."""
    max_processes: Annotated[int | Auto, Whole(ge=1, le=2**20)] = "auto"
    """Processes that a size gets at most; auto: as many as tuner train would start here."""

    rules: ClassVar[tuple[Rule, ...]] = table_rules("ladder_rules")

    @property
    def is_on(self) -> bool:
        """Whether there are sizes."""
        return bool(self.sizes)


def require_sizes(ladder: LadderSection) -> None:
    """Raise RecipeError for a recipe of one run, where a ladder is asked for."""
    if not ladder.sizes:
        raise RecipeError(
            "this recipe has no ladder: it names no ladder.sizes",
            hint="write ladder: {sizes: [60M, 190M]}, or train it alone: tuner train RECIPE",
        )


def require_one_run(ladder: LadderSection) -> None:
    """Raise RecipeError for a recipe of several runs, where one is to be trained, predicted or measured."""
    if ladder.sizes:
        raise RecipeError(
            f"this recipe is a ladder of {len(ladder.sizes)} sizes (ladder.sizes), not one run",
            hint="see what each takes: tuner ladder plan RECIPE      train them, or one: tuner ladder run RECIPE "
            "[--rung NAME]",
        )
