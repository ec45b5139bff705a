"""From a loss to the score of a task by a sigmoid: the second of two steps.

score = floor + (ceiling - floor) / (1 + exp(k (L - middle))), as in Bhagia et al., Establishing Task Scaling Laws via
Compute-Efficient Model Ladders, 2024 (arXiv:2412.04403). Points before the decay of the learning rate count here too:
what a loss is worth does not depend on how it was reached.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.errors import DataError, RecipeError
from tuner.ladder.fit import CurveFamily, CurveValues, Estimate, Floats, Noise, Parameter, Settings, best_fit, bootstrap
from tuner.ladder.points import Point, require_figure, with_figure

NAMES = ("middle", "k", "floor", "ceiling")
NEEDED = 6
"""Points that a sigmoid needs: two more than it has parameters."""
CLEARER = 4.0
"""How much more than a point's noise a parameter of the sigmoid explains (an F value), or a constant is as good."""
FLATTEST, STEEPEST = 0.1, 50.0
"""The range of k in units of the spread of the losses."""


@dataclass(frozen=True)
class Sigmoid(CurveFamily):
    """Scores over standardised losses (points,); parameters are middle, log k, floor, ceiling."""

    losses: Floats

    def at(self, parameters: Floats) -> CurveValues:
        """Scores and their derivatives."""
        middle, steepness = parameters[:, :1], np.exp(parameters[:, 1:2])
        floor, ceiling = parameters[:, 2:3], parameters[:, 3:4]
        gap = middle - self.losses
        share = 0.5 * (1 + np.tanh(0.5 * steepness * gap))
        bend = (ceiling - floor) * share * (1 - share) * steepness
        return CurveValues(floor + (ceiling - floor) * share, np.stack([bend, bend * gap, 1 - share, share], axis=2))


@dataclass(frozen=True)
class ScoreFit:
    """The sigmoid of one figure; losses are standardised by `centre` and `spread`."""

    figure: str
    points: tuple[Point, ...]
    centre: float
    spread: float
    curve: Sigmoid
    parameters: Floats
    samples: Floats
    noise: Noise
    settings: Settings

    def predict(self, losses: Floats, value: float) -> Estimate:
        """The score at a loss `value` whose draws (samples,) are `losses`, the noise of a measured score included."""
        random = np.random.default_rng([self.settings.seed, 3])
        scores = self._scores(self.samples, losses[:, None]) + self.noise.draw((len(losses), 1), random)
        middle = self._scores(self.parameters[None], np.array([[value]]))[0]
        return Estimate.each(middle, np.clip(scores, 0, 1), self.settings.level)[0]

    def band(self, losses: Floats) -> list[Estimate]:
        """The curve at some losses (values,), without the noise of a measured score."""
        middle = self._scores(self.parameters[None], losses[None])[0]
        return Estimate.each(middle, self._scores(self.samples, losses[None]), self.settings.level)

    def _scores(self, parameters: Floats, losses: Floats) -> Floats:
        standard = (losses - self.centre) / self.spread
        return replace(self.curve, losses=standard).at(parameters).values


def fit_score(points: Sequence[Point], loss: str, figure: str, settings: Settings, chance: float | None) -> ScoreFit:
    """Fit the sigmoid of a figure over a loss; `chance` fixes its floor.

    Raises RecipeError for a figure that is no share, and DataError where the points do not determine a sigmoid.
    """
    require_figure(points, figure)
    both = [point for point in with_figure(points, loss) if figure in point.figures]
    scores = np.array([point.figures[figure] for point in both])
    if len(both) < NEEDED:
        raise DataError(
            f"{len(both)} points have {figure} and {loss}: a sigmoid needs at least {NEEDED}",
            hint="train more rungs, or evaluate the task at more marks",
        )
    if scores.min() < 0 or scores.max() > 1:
        raise RecipeError(f"{figure} is no share between 0 and 1", hint="name a figure such as an accuracy")
    losses = np.array([point.figures[loss] for point in both])
    centre, spread = float(losses.mean()), float(losses.std()) or 1.0
    standard = (losses - centre) / spread
    curve = _curve(standard, chance)
    best = best_fit(curve, scores, _starts(standard, scores, chance), settings.delta)
    _require_slope(figure, scores, best.values, best.starts[0])
    noise = Noise(best.noise)
    samples = bootstrap(curve, best, noise, settings, 2)
    return ScoreFit(figure, tuple(both), centre, spread, curve, best.starts[0], samples, noise, settings)


def parameters_of(fit: ScoreFit) -> list[Parameter]:
    """Middle (a loss), k (per unit of loss), floor and ceiling, with what keeps the points from identifying each."""
    value = _natural(fit, fit.parameters[None])[0]
    middle, steepness = float(fit.parameters[0]), math.exp(float(fit.parameters[1]))
    reached = [0.5 * (1 + math.tanh(0.5 * steepness * (middle - at))) for at in _ends(fit)]
    why = dict.fromkeys(NAMES, "")
    if reached[0] < 0.5:
        why["ceiling"] = why["middle"] = "no point is past the middle of the sigmoid"
    if reached[1] > 0.5 and fit.curve.low[2] < fit.curve.high[2]:
        why["floor"] = why["middle"] = "no point is before the middle of the sigmoid"
    estimates = Estimate.each(value, _natural(fit, fit.samples), fit.settings.level)
    return [Parameter(name, estimate, why[name]) for name, estimate in zip(NAMES, estimates, strict=True)]


def _ends(fit: ScoreFit) -> list[float]:
    """The lowest and the highest loss, standardised."""
    return [float(fit.curve.losses.min()), float(fit.curve.losses.max())]


def _natural(fit: ScoreFit, parameters: Floats) -> Floats:
    found = parameters.copy()
    found[:, 0] = fit.centre + fit.spread * parameters[:, 0]
    found[:, 1] = np.exp(parameters[:, 1]) / fit.spread
    return found


def _curve(losses: Floats, chance: float | None) -> Sigmoid:
    least, most = (0.0, 1.0) if chance is None else (chance, chance)
    low = [float(losses.min()) - 6, math.log(FLATTEST), least, 0.0]
    high = [float(losses.max()) + 3, math.log(STEEPEST), most, 1.0]
    return Sigmoid(np.array(low), np.array(high), losses)


def _starts(losses: Floats, scores: Floats, chance: float | None) -> Floats:
    middles = np.linspace(losses.min() - 2, losses.max() + 1, 9)
    floors = (float(scores.min()), 0.5 * float(scores.min())) if chance is None else (chance,)
    ceilings = (float(scores.max()), 0.5 * (1 + float(scores.max())), 1.0)
    grid = itertools.product(middles, np.log([0.3, 1.0, 3.0, 10.0]), floors, ceilings)
    return np.array([list(one) for one in grid], dtype=np.float64)


def _require_slope(figure: str, scores: Floats, fitted: Floats, parameters: Floats) -> None:
    """Raise DataError where a constant is as good, or where scores fall as the loss does."""
    around, about = float(((scores - scores.mean()) ** 2).sum()), float(((scores - fitted) ** 2).sum())
    shown = f"{figure} is {scores.min():.3g} to {scores.max():.3g}"
    if around - about <= CLEARER * (len(NAMES) - 1) * about / (len(scores) - len(NAMES)):
        raise DataError(
            f"{shown}, and a constant fits it as well as a sigmoid over the loss: these points are before its knee",
            hint="train larger rungs, or fit the loss of the task's right answers instead, with --loss",
        )
    if parameters[3] < parameters[2]:
        raise DataError(f"{shown}, and it falls where the loss falls", hint="name a score that is higher where better")
