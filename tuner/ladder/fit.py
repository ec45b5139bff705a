"""The law of scaling, L = E + A/N^a + B/D^b over parameters N and tokens D, fitted to points by Huber's loss of log L.

The law is fitted in logarithms: log L = logsumexp(e, A' - a log N, B' - b log D), as in Hoffmann et al., Training
Compute-Optimal Large Language Models, 2022, approach 3 (arXiv:2203.15556); log N and log D are counted from the points'
mean, which parts what a term weighs there from how fast it falls.

It is fitted from many starts at once, by Levenberg and Marquardt's method on batches. A curve is given by its values
and derivatives; each member of a batch is a start, or a data set of a bootstrap. Huber's loss is minimised by
quadratics that lie above it and touch it at the newest parameters (iterated weights), so that no step makes it larger:
Huber and Ronchetti, Robust Statistics, 2009, section 7.8.

The bootstrap says what the points leave open. It keeps sizes and tokens as they are, and draws the noise of each point
from the residuals (those of the points that the parameters cannot fit exactly), scaled by what so few of them leave
open about their own size. Resampling the points themselves would often leave out an end of the ladder.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.errors import DataError, counted
from tuner.ladder.points import Axis, Point, Size, short

FIRST_STEPS, LAST_STEPS, DRAW_STEPS = 25, 300, 120
"""Steps of every start, of the best of them, and of each sample of the bootstrap."""
FINALISTS = 24
REMEMBERED = 3
"""Starts of each sample of the bootstrap: the fit, and the best fits of all points with a clearly different E."""
OF_NORMAL_NOISE = 1.345
"""Where Huber's loss becomes linear, in standard deviations of the noise: it loses 5 % against least squares then."""
NORMAL_MEDIAN = 0.6745
"""The median size of normal noise in standard deviations."""
AT_AN_END = 1.05
"""A factor from an end of its range within which a parameter is at that end."""


@dataclass(frozen=True)
class Settings:
    """How a fit is made: the level of intervals, and the least deviation of log L at which Huber's loss is linear."""

    level: float = 0.9
    samples: int = 1000
    seed: int = 0
    delta: float = 1e-3


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval that the level of the fit asks for."""

    value: float
    low: float
    high: float

    @classmethod
    def each(cls, values: Floats, draws: Floats, level: float) -> list[Estimate]:
        """Those of values (n,) with intervals of their draws (samples, n)."""
        return [cls(*map(float, each)) for each in zip(values, *interval(draws, level), strict=True)]


@dataclass(frozen=True)
class Noise:
    """Deviations of points from the curve: their sizes, with so many degrees of freedom, times `scale`."""

    sizes: Floats
    scale: float = 1.0

    def draw(self, shape: tuple[int, int], random: np.random.Generator) -> Floats:
        """Deviations (samples, points); the samples of one row share how large the noise is."""
        freedom = len(self.sizes)
        spread = self.scale * np.sqrt(freedom / random.chisquare(freedom, shape[0]))
        signs = random.choice(np.array([-1.0, 1.0]), shape)
        return np.asarray(spread[:, None] * signs * random.choice(self.sizes, shape))


@dataclass(frozen=True)
class LawFit:
    """A law through points: its parameters, and those (samples, parameters) of the bootstrap."""

    form: LawForm
    points: tuple[Point, ...]
    figure: str
    parameters: Floats
    samples: Floats
    residuals: Floats
    noise: Noise
    delta: float
    settings: Settings

    def predict(self, sizes: Sequence[Size]) -> list[Estimate]:
        """The loss that a run of each size is expected to reach, its own noise included."""
        middle = np.exp(self.form.logs(self.parameters[None], sizes)[0])
        return Estimate.each(middle, self.draws(sizes), self.settings.level)

    def draws(self, sizes: Sequence[Size]) -> Floats:
        """Losses that runs of these sizes may reach: (samples, sizes)."""
        random = np.random.default_rng([self.settings.seed, 1])
        logs = self.form.logs(self.samples, sizes)
        return np.asarray(np.exp(logs + self.noise.draw((len(logs), len(sizes)), random)))

    def band(self, sizes: Sequence[Size]) -> list[Estimate]:
        """The curve itself at some sizes, without the noise of a run."""
        middle = np.exp(self.form.logs(self.parameters[None], sizes)[0])
        return Estimate.each(middle, np.exp(self.form.logs(self.samples, sizes)), self.settings.level)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the law by its letter; `why` says why the points do not identify it, else it is empty."""

    name: str
    value: Estimate
    why: str = ""


def fit_law(points: Sequence[Point], figure: str, settings: Settings, needed: int, scale: float = 1.0) -> LawFit:
    """Fit the law that the points can determine; `scale` widens their noise. Raises DataError for too few."""
    form = form_of(points, needed)
    logs = np.log(np.array([point.figures[figure] for point in points]))
    curve = form.curve(form.design([point.size for point in points]), logs)
    best = best_fit(curve, logs, starts_of(form, logs), settings.delta)
    noise = Noise(best.noise, scale)
    samples, residuals = bootstrap(curve, best, noise, settings, 0), logs - best.values
    return LawFit(form, tuple(points), figure, best.starts[0], samples, residuals, noise, best.delta, settings)


@dataclass(frozen=True)
class BestFit:
    """The best parameters, then other good starts (starts, parameters); the curve's values, and the noise about it."""

    starts: Floats
    values: Floats
    noise: Floats
    delta: float


def best_fit(curve: CurveFamily, targets: Floats, starts: Floats, delta: float) -> BestFit:
    """Fit by Huber's loss from many starts, first linear from `delta`, then from what the noise is found to be.

    The second keeps outliers out as the first does, and uses the other points better where the noise is larger.
    """
    found = best_starts(curve, targets, starts, delta)
    sizes = _noise_sizes(targets - curve.at(found[:1]).values[0], found.shape[1])
    delta = max(delta, OF_NORMAL_NOISE * float(np.median(sizes)) / NORMAL_MEDIAN)
    again = fit_curves(curve, targets, found, delta, LAST_STEPS)
    found = again.parameters[np.argsort(again.loss, kind="stable")]
    values = curve.at(found[:1]).values[0]
    return BestFit(found, values, _noise_sizes(targets - values, found.shape[1]), delta)


def _noise_sizes(residuals: Floats, parameters: int) -> Floats:
    """The sizes of residuals that say how large the noise is: as many as there are parameters can be fitted exactly."""
    return np.asarray(np.maximum(np.sort(np.abs(residuals))[parameters:], 1e-12))


def best_starts(curve: CurveFamily, targets: Floats, starts: Floats, delta: float) -> Floats:
    """The best fit of the targets (points,), then others whose first parameter clearly differs: (starts, parameters).

    Every start takes some steps by a wide Huber's loss, which has fewer minima; the best then take those by the given
    one.
    """
    wide = fit_curves(curve, targets, starts, 20 * delta, FIRST_STEPS)
    near = wide.parameters[np.argsort(huber(curve.at(wide.parameters).values - targets, delta), kind="stable")]
    final = fit_curves(curve, targets, near[:FINALISTS], delta, LAST_STEPS)
    order = np.argsort(final.loss, kind="stable")
    best = [final.parameters[order[0]]]
    for parameters in [*final.parameters[order[1:]], *near[FINALISTS:]]:
        if len(best) < REMEMBERED and min(abs(parameters[0] - other[0]) for other in best) > 0.3:
            best.append(parameters)
    return np.array(best)


def bootstrap(curve: CurveFamily, best: BestFit, noise: Noise, settings: Settings, stream: int) -> Floats:
    """The best parameters (samples, parameters) for the fit's values with noise; `stream` parts its random numbers."""
    random, count = np.random.default_rng([settings.seed, stream]), len(best.starts)
    targets = best.values + noise.draw((settings.samples, len(best.values)), random)
    starts = np.tile(best.starts, (settings.samples, 1))
    found = fit_curves(curve, np.repeat(targets, count, axis=0), starts, best.delta, DRAW_STEPS)
    chosen = found.loss.reshape(settings.samples, count).argmin(axis=1)
    return np.asarray(found.parameters.reshape(settings.samples, count, -1)[np.arange(settings.samples), chosen])


def interval(draws: Floats, level: float) -> Floats:
    """The ends (2, ...) of the interval that holds so much of the draws (samples, ...)."""
    outside = (1 - level) / 2
    return np.asarray(np.quantile(draws, (outside, 1 - outside), axis=0))


def parameters_of(fit: LawFit) -> list[Parameter]:
    """E, A, B, a and b, each with its interval, and with what keeps the points from identifying it."""
    value = fit.form.natural(fit.parameters[None])[0]
    estimates = Estimate.each(value, fit.form.natural(fit.samples), fit.settings.level)
    named = dict(zip(fit.form.names, estimates, strict=True))
    lowest = min(point.figures[fit.figure] for point in fit.points)
    why = {"E": _why_not_constant(named["E"], lowest)}
    for axis in fit.form.axes:
        letter = LETTERS[axis]
        why[letter] = why[letter.lower()] = _why_not_exponent(named[letter.lower()], axis)
    found = [Parameter(name, estimate, why[name]) for name, estimate in named.items()]
    if fit.form.line is not None:
        letter = LETTERS[fit.form.line.axis]
        reason = f"every point has {fit.form.line.words()}"
        nothing = Estimate(float("nan"), float("nan"), float("nan"))
        found += [Parameter(name, nothing, reason) for name in (letter, letter.lower())]
    return found


def _why_not_constant(constant: Estimate, lowest: float) -> str:
    if constant.low <= lowest * LEAST_SHARE * AT_AN_END:
        return f"any E from 0 to {constant.high:.4g} fits these points"
    if constant.high >= lowest / AT_AN_END and constant.low <= lowest * 0.1:
        return f"any E from {constant.low:.4g} to {constant.high:.4g} fits these points"
    return ""


def _why_not_exponent(exponent: Estimate, axis: str) -> str:
    if exponent.low <= LEAST_EXPONENT * AT_AN_END:
        return f"any exponent up to {exponent.high:.2g} fits: more {axis} change the loss too little here"
    if exponent.high >= MOST_EXPONENT / AT_AN_END:
        return f"any exponent from {exponent.low:.2g} fits: the term of {axis} is too small here to tell"
    return ""


Floats = NDArray[np.float64]
CHUNK = 1 << 17
"""Values (members times points) that are computed at once: what a cache holds."""
CONVERGED = 1e-8
"""A relative gain of a step below which a member is done."""
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-9, 1e9


@dataclass(frozen=True)
class CurveValues:
    """A curve at the points, for B parameter vectors: values (B, points) and derivatives (B, points, parameters)."""

    values: Floats
    derivatives: Floats


@dataclass(frozen=True)
class CurveFamily(ABC):
    """A family of curves over the points, with the range in which each parameter may lie."""

    low: Floats
    """The least value of each parameter."""
    high: Floats
    """The largest value of each parameter."""

    @abstractmethod
    def at(self, parameters: Floats) -> CurveValues:
        """The values for parameters (B, parameters)."""


@dataclass(frozen=True)
class Fitted:
    """Parameters (B, parameters) and the mean of Huber's loss (B,)."""

    parameters: Floats
    loss: Floats


def huber(residuals: Floats, delta: float) -> Floats:
    """The mean over the last axis of Huber's loss: r^2/2 up to `delta`, linear beyond."""
    size = np.abs(residuals)
    each = np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))
    return np.asarray(each.mean(axis=-1))


def fit_curves(curve: CurveFamily, targets: Floats, starts: Floats, delta: float, steps: int) -> Fitted:
    """Fit every start (B, parameters) to its target (B, points), or all to one (points,), in at most so many steps."""
    targets = np.broadcast_to(targets, (len(starts), targets.shape[-1]))
    size = max(1, CHUNK // targets.shape[-1])
    cuts = [slice(i, i + size) for i in range(0, len(starts), size)]
    parts = [_fit_chunk(curve, targets[cut], starts[cut], delta, steps) for cut in cuts]
    return Fitted(np.concatenate([part.parameters for part in parts]), np.concatenate([part.loss for part in parts]))


def _fit_chunk(curve: CurveFamily, targets: Floats, starts: Floats, delta: float, steps: int) -> Fitted:
    parameters = np.clip(starts, curve.low, curve.high)
    loss = huber(curve.at(parameters).values - targets, delta)
    damping = np.full(len(parameters), FIRST_DAMPING)
    active = np.arange(len(parameters))
    for _ in range(steps):
        if not len(active):
            break
        tried = _step(curve, targets[active], parameters[active], damping[active], delta)
        tried_loss = huber(curve.at(tried).values - targets[active], delta)
        gain = loss[active] - tried_loss
        better = gain > 0
        taken = active[better]
        parameters[taken], loss[taken] = tried[better], tried_loss[better]
        damping[active] = np.clip(np.where(better, damping[active] / 4, damping[active] * 6), LEAST_DAMPING, None)
        done = (better & (gain <= CONVERGED * loss[active])) | (damping[active] > MOST_DAMPING)
        active = active[~done]
    return Fitted(parameters, loss)


def _step(curve: CurveFamily, targets: Floats, parameters: Floats, damping: Floats, delta: float) -> Floats:
    """Parameters after one damped step; those at an end of their range stay there where the step leads out."""
    now = curve.at(parameters)
    residuals = now.values - targets
    weights = delta / np.maximum(np.abs(residuals), delta)
    weighted = now.derivatives * weights[:, :, None]
    slope = np.einsum("bnp,bn->bp", weighted, residuals)
    outward = ((parameters <= curve.low) & (slope > 0)) | ((parameters >= curve.high) & (slope < 0))
    weighted = np.where(outward[:, None, :], 0.0, weighted)
    free = np.where(outward[:, None, :], 0.0, now.derivatives)
    bend = weighted.transpose(0, 2, 1) @ free
    diagonal = np.einsum("bpp->bp", bend)
    scale = np.maximum(diagonal, 1e-12 * diagonal.max(axis=1, keepdims=True) + 1e-30)
    each = np.arange(parameters.shape[1])
    bend[:, each, each] += damping[:, None] * scale
    bend[:, each, each] += np.where(outward, 1.0, 0.0)
    move = np.linalg.solve(bend, np.where(outward, 0.0, slope)[:, :, None])[:, :, 0]
    return np.clip(parameters - move, curve.low, curve.high)


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
    return 1 + int((np.diff(np.sort(logs)) > SAME_SIZE).sum())
