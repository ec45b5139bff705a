"""The law fitted to points: by Huber's loss of log L from many starts, with a bootstrap of what the points leave open.

The bootstrap keeps sizes and tokens as they are, and draws the noise of each point from the residuals (those of the
points that the parameters cannot fit exactly), scaled by what so few of them leave open about their own size.
Resampling the points themselves would often leave out an end of the ladder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.ladder.law import LEAST_EXPONENT, LEAST_SHARE, LETTERS, MOST_EXPONENT, LawForm, form_of, starts_of
from tuner.ladder.points import Point, Size
from tuner.ladder.robust import CurveFamily, Floats, fit_curves, huber

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
