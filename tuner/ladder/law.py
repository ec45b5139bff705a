"""The law of scaling, L = E + A/N^a + B/D^b, as a family of curves over parameters N and tokens D.

It is fitted in logarithms: log L = logsumexp(e, A' - a log N, B' - b log D), as in Hoffmann et al., Training
Compute-Optimal Large Language Models, 2022, approach 3 (arXiv:2203.15556); log N and log D are counted from the points'
mean, which parts what a term weighs there from how fast it falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.errors import DataError, counted
from tuner.ladder.points import Axis, Point, Size, short
from tuner.ladder.robust import CurveFamily, CurveValues, Floats

LETTERS: dict[Axis, str] = {"parameters": "A", "tokens": "B"}
SYMBOLS: dict[Axis, str] = {"parameters": "N", "tokens": "D"}
LEAST_EXPONENT, MOST_EXPONENT = 0.01, 3.0
"""The range of exponents: at its ends a term is flat, or gone at the second point."""
LEAST_SHARE = 1e-3
"""E as a share of the lowest loss at which it is none."""
SAME_SIZE = 0.01
"""Relative difference below which two counts of parameters or tokens are one."""
COLLINEAR = 0.05
"""Spread of log D about a line over log N (one standard deviation) below which the two cannot be told apart."""
NEAR_LINE = 0.1
"""How far off that line, in log D or log N, a target may be."""
NEEDED_SIZES = 4
"""Sizes that a term needs: three determine E, a factor and an exponent, whatever they are."""


@dataclass(frozen=True)
class Line:
    """An axis without a term, at every point: its logarithm is `offset` + `slope` * that of the other axis."""

    axis: Axis
    offset: float
    slope: float

    def words(self) -> str:
        """The line as people say it."""
        if abs(self.slope) < COLLINEAR:
            return f"{short(math.exp(self.offset))} {self.axis}"
        if self.axis == "tokens" and abs(self.slope - 1) < COLLINEAR:
            return f"{math.exp(self.offset):.3g} tokens per parameter"
        return f"{self.axis} in proportion to {'N' if self.axis == 'tokens' else 'D'}^{self.slope:.2f}"


@dataclass(frozen=True)
class LawForm:
    """Which terms a law has, and the logarithms from which its axes are counted."""

    axes: tuple[Axis, ...]
    centre: tuple[float, ...]
    line: Line | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters by name: E, then the factors, then the exponents."""
        letters = [LETTERS[axis] for axis in self.axes]
        return ("E", *letters, *(letter.lower() for letter in letters))

    @property
    def text(self) -> str:
        """The law as a formula."""
        terms = [f"{LETTERS[axis]}/{SYMBOLS[axis]}^{LETTERS[axis].lower()}" for axis in self.axes]
        return " + ".join(["L = E", *terms])

    def design(self, sizes: Sequence[Size]) -> Floats:
        """The centred logarithms of each axis that has a term: (points, terms)."""
        logs = np.log([[size.along(axis) for axis in self.axes] for size in sizes])
        return np.asarray(logs - np.array(self.centre))

    def is_on_line(self, size: Size) -> bool:
        """Whether this law can speak about a size: anywhere where it has both terms."""
        if self.line is None:
            return True
        other = math.log(size.along(self.axes[0]))
        return abs(math.log(size.along(self.line.axis)) - self.line.offset - self.line.slope * other) <= NEAR_LINE

    def logs(self, parameters: Floats, sizes: Sequence[Size]) -> Floats:
        """Logarithms of the loss at some sizes, for B parameter vectors: (B, sizes)."""
        return self.curve(self.design(sizes), np.zeros(2)).at(parameters).values

    def curve(self, design: Floats, losses: Floats) -> LawCurve:
        """The family of curves over a design; `losses` are the logarithms that bound E."""
        terms = len(self.axes)
        lowest, highest = float(losses.min()), float(losses.max())
        low = [lowest + math.log(LEAST_SHARE), *[lowest - 12.0] * terms, *[LEAST_EXPONENT] * terms]
        high = [highest, *[highest + 3.0] * terms, *[MOST_EXPONENT] * terms]
        return LawCurve(np.array(low), np.array(high), design)

    def natural(self, parameters: Floats) -> Floats:
        """E, A, B, a, b from the parameters of the curve (B, parameters): factors are those of N and D uncentred."""
        terms = len(self.axes)
        exponents = parameters[:, 1 + terms :]
        with np.errstate(over="ignore"):
            factors = np.exp(parameters[:, 1 : 1 + terms] + exponents * np.array(self.centre))
        return np.concatenate([np.exp(parameters[:, :1]), factors, exponents], axis=1)


@dataclass(frozen=True)
class LawCurve(CurveFamily):
    """log L over a design (points, terms); parameters are e, then one A' and then one a for each term."""

    design: Floats

    def at(self, parameters: Floats) -> CurveValues:
        """log L and its derivatives."""
        terms = self.design.shape[1]
        constant, factors, exponents = parameters[:, :1], parameters[:, 1 : 1 + terms], parameters[:, 1 + terms :]
        parts = factors[:, None, :] - exponents[:, None, :] * self.design
        top = np.maximum(parts.max(axis=2), constant)
        shares = np.exp(parts - top[:, :, None])
        rest = np.exp(constant - top)
        total = rest + shares.sum(axis=2)
        shares /= total[:, :, None]
        derivatives = np.concatenate([(rest / total)[:, :, None], shares, -shares * self.design], axis=2)
        return CurveValues(top + np.log(total), derivatives)


def form_of(points: Sequence[Point], needed: int = NEEDED_SIZES) -> LawForm:
    """The law that these points can determine: both terms, or one of them along a line.

    Raises DataError where there are too few sizes or points.
    """
    logs = np.log([[point.parameters, point.tokens] for point in points])
    if not len(logs):
        raise DataError("there are no points to fit", hint=f"a fit needs at least {needed} sizes of model")
    sizes, counts = _different(logs[:, 0]), _different(logs[:, 1])
    if sizes == 1 and counts >= needed:
        line = Line("parameters", float(logs[0, 0]), 0.0)
        return _enough(LawForm(("tokens",), (float(logs[:, 1].mean()),), line), points)
    if sizes < needed:
        raise DataError(
            f"{counted(sizes, 'size')} of model, and a fit of L = E + A/N^a + B/D^b needs at least {needed}: "
            "three determine E, A and a whatever the losses are",
            hint="train more rungs of the ladder",
        )
    centred = logs[:, 0] - logs[:, 0].mean()
    slope = float(centred @ logs[:, 1] / (centred @ centred))
    offset = float(logs[:, 1].mean() - slope * logs[:, 0].mean())
    spread = float(np.std(logs[:, 1] - offset - slope * logs[:, 0]))
    centre = logs.mean(axis=0)
    if spread < COLLINEAR:
        return _enough(LawForm(("parameters",), (float(centre[0]),), Line("tokens", offset, slope)), points)
    return _enough(LawForm(("parameters", "tokens"), (float(centre[0]), float(centre[1]))), points)


def starts_of(form: LawForm, losses: Floats) -> Floats:
    """A grid of parameters to begin at: E as a share of the lowest loss, the terms' shares of the rest, exponents."""
    lowest, middle = math.exp(float(losses.min())), math.exp(float(np.median(losses)))
    shares = [(1.0,)] if len(form.axes) == 1 else [(part, 1 - part) for part in (0.2, 0.5, 0.8)]
    exponents = (0.08, 0.2, 0.4, 0.7, 1.3)
    starts = []
    for constant in (0.05, 0.4, 0.7, 0.92):
        rest = middle - constant * lowest
        for share, slopes in itertools.product(shares, itertools.product(exponents, repeat=len(form.axes))):
            starts.append([math.log(constant * lowest), *(math.log(rest * part) for part in share), *slopes])
    return np.array(starts)


def _enough(form: LawForm, points: Sequence[Point]) -> LawForm:
    needed = len(form.names) + 1
    if len(points) < needed:
        raise DataError(
            f"{counted(len(points), 'point')}, and {form.text} has {len(form.names)} parameters: "
            f"a fit needs at least {needed}",
            hint="train more rungs, or give each more marks",
        )
    return form


def _different(logs: Floats) -> int:
    """How many different values there are among logarithms."""
    ordered = np.sort(logs)
    return 1 + int((np.diff(ordered) > SAME_SIZE).sum())
