"""What a ladder says about a size that was not trained: the law, its error on rungs left out, losses and scores.

Each rung is predicted from the others: the error that says what an extrapolation is worth, unlike R squared.

From a loss to the score of a task leads a sigmoid, the second of two steps: score = floor + (ceiling - floor) / (1 +
exp(k (L - middle))), as in Bhagia et al., Establishing Task Scaling Laws via Compute-Efficient Model Ladders, 2024
(arXiv:2412.04403). Points before the decay of the learning rate count there too: what a loss is worth does not depend
on how it was reached.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.errors import DataError, RecipeError
from tuner.ladder import fit as fitting
from tuner.ladder.fit import Estimate, Floats, LawFit, Settings, fit_law
from tuner.ladder.points import LOSS, Point, Size, by_rung, require_figure, short, with_figure

NAMES = ("middle", "k", "floor", "ceiling")
NEEDED = 6
"""Points that a sigmoid needs: two more than it has parameters."""
CLEARER = 4.0
"""How much more than a point's noise a parameter of the sigmoid explains (an F value), or a constant is as good."""
FLATTEST, STEEPEST = 0.1, 50.0
"""The range of k in units of the spread of the losses."""


@dataclass(frozen=True)
class Sigmoid(fitting.CurveFamily):
    """Scores over standardised losses (points,); parameters are middle, log k, floor, ceiling."""

    losses: Floats

    def at(self, parameters: Floats) -> fitting.CurveValues:
        """Scores and their derivatives."""
        middle, steepness = parameters[:, :1], np.exp(parameters[:, 1:2])
        floor, ceiling = parameters[:, 2:3], parameters[:, 3:4]
        gap = middle - self.losses
        share = 0.5 * (1 + np.tanh(0.5 * steepness * gap))
        bend = (ceiling - floor) * share * (1 - share) * steepness
        derivatives = np.stack([bend, bend * gap, 1 - share, share], axis=2)
        return fitting.CurveValues(floor + (ceiling - floor) * share, derivatives)


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
    noise: fitting.Noise
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
    best = fitting.best_fit(curve, scores, _starts(standard, scores, chance), settings.delta)
    _require_slope(figure, scores, best.values, best.starts[0])
    noise = fitting.Noise(best.noise)
    samples = fitting.bootstrap(curve, best, noise, settings, 2)
    return ScoreFit(figure, tuple(both), centre, spread, curve, best.starts[0], samples, noise, settings)


def sigmoid_parameters(fit: ScoreFit) -> list[fitting.Parameter]:
    """Middle (a loss), k (per unit of loss), floor and ceiling, with what keeps the points from identifying each."""
    value = _natural(fit, fit.parameters[None])[0]
    middle, steepness = float(fit.parameters[0]), math.exp(float(fit.parameters[1]))
    ends = (float(fit.curve.losses.min()), float(fit.curve.losses.max()))
    reached = [0.5 * (1 + math.tanh(0.5 * steepness * (middle - at))) for at in ends]
    why = dict.fromkeys(NAMES, "")
    if reached[0] < 0.5:
        why["ceiling"] = why["middle"] = "no point is past the middle of the sigmoid"
    if reached[1] > 0.5 and fit.curve.low[2] < fit.curve.high[2]:
        why["floor"] = why["middle"] = "no point is before the middle of the sigmoid"
    estimates = Estimate.each(value, _natural(fit, fit.samples), fit.settings.level)
    return [fitting.Parameter(name, estimate, why[name]) for name, estimate in zip(NAMES, estimates, strict=True)]


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


SAMPLES = 200
"""Samples of the bootstrap of each fit without a rung: they tell a spread, and no ends of intervals."""
ONE_SIGMA = 0.6827
NEEDED_WITHOUT = 3
"""Sizes that a fit without a rung needs: three predict, and what they leave open is in their intervals."""


@dataclass(frozen=True)
class LadderHeldOut:
    """One rung at its last mark: measured, and predicted from every other rung."""

    rung: str
    size: Size
    measured: float
    predicted: Estimate
    deviations: float
    """The error in standard deviations of the prediction: the median over the rung's marks."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.value / self.measured - 1


def held_out(points: Sequence[Point], figure: str, settings: Settings, form: fitting.LawForm) -> list[LadderHeldOut]:
    """Predict each rung from the others; one without which the same law cannot be fitted is left out."""
    rungs, found = by_rung(points), []
    few = replace(settings, samples=min(SAMPLES, settings.samples))
    for name, own in rungs.items():
        others = [point for rung, points in rungs.items() if rung != name for point in points]
        try:
            fit = fit_law(others, figure, few, NEEDED_WITHOUT)
        except DataError:
            continue
        if fit.form.axes == form.axes and (one := compared(fit, own)) is not None:
            found.append(one)
    return found


def compared(fit: LawFit, own: Sequence[Point]) -> LadderHeldOut | None:
    """A rung's points next to what a fit without them predicts; None where it cannot speak about them."""
    sizes = [point.size for point in own]
    if not all(fit.form.is_on_line(size) for size in sizes):
        return None
    measured = np.log([point.figures[fit.figure] for point in own])
    middle = fit.form.logs(fit.parameters[None], sizes)[0]
    low, high = fitting.interval(np.log(fit.draws(sizes)), ONE_SIGMA)
    deviations = float(np.median(np.abs(measured - middle) / np.maximum((high - low) / 2, 1e-12)))
    last = own[-1]
    return LadderHeldOut(last.rung, sizes[-1], last.figures[fit.figure], fit.predict(sizes[-1:])[0], deviations)


def widening(left: Sequence[LadderHeldOut]) -> float:
    """How many times wider than their residuals the points' noise has to be for the rungs that were left out.

    Residuals do not show noise that all marks of a rung share, nor where the law is not the truth: errors on rungs that
    were left out show both.
    """
    return max(1.0, math.sqrt(sum(one.deviations**2 for one in left) / len(left))) if left else 1.0


def fit_widened(
    points: Sequence[Point], figure: str, settings: Settings, needed: int
) -> tuple[LawFit, list[LadderHeldOut]]:
    """The law with intervals as wide as the errors on left-out rungs ask, and these. Raises DataError for too few."""
    form = fitting.form_of(points, needed)
    left = held_out(points, figure, settings, form)
    return fit_law(points, figure, settings, needed, widening(left)), left


FAR = 10.0
"""How many times the FLOPs of the largest point a target may have before that is said."""


@dataclass(frozen=True)
class ForecastQuestion:
    """What is asked: the loss and scores by their figures, and a target, by a rung's name or a size."""

    settings: Settings = field(default_factory=Settings)
    loss: str = LOSS
    scores: tuple[str, ...] = ()
    chance: float | None = None
    rung: str | None = None
    size: Size | None = None


@dataclass(frozen=True)
class Forecast:
    """The answer: a fit, each rung predicted from the others, and the target with its scores.

    `target` was left out of the fit where it was trained: `checked` has it next to what was measured.
    """

    fit: LawFit
    left_out: list[LadderHeldOut]
    scores: list[ScoreFit]
    target: Size | None
    loss: Estimate | None
    predicted_scores: dict[str, Estimate]
    measured_scores: dict[str, float]
    checked: LadderHeldOut | None
    notes: list[str]


def forecast(points: Sequence[Point], question: ForecastQuestion) -> Forecast:
    """Fit and predict. Raises RecipeError for figures and rungs that are not there, DataError for too few points."""
    measured = with_figure(points, question.loss)
    missing = len(points) - len(measured)
    notes = [f"{missing} points have no finite {question.loss} above 0 and are left out"] if missing else []
    own = _own_points(measured, question.rung)
    rest = [point for point in measured if point.rung != question.rung]
    decayed = [point for point in rest if point.is_decayed]
    if early := len(rest) - len(decayed):
        notes.append(f"{early} points before the decay of the learning rate are not fitted by the law")
    target = own[-1].size if own else question.size
    if target is not None:
        _require_on_line(fitting.form_of(decayed), target)
        notes += _far(decayed, target)
    for figure in question.scores:
        require_figure(rest, figure)  # a misspelt one is said before the fit, which takes seconds
    law, left_out = fit_widened(decayed, question.loss, question.settings, fitting.NEEDED_SIZES)
    loss = None if target is None else law.predict([target])[0]
    scores, predicted = [], {}
    for figure in question.scores:
        try:
            fit = fit_score(rest, question.loss, figure, question.settings, question.chance)
        except DataError as error:
            notes.append(f"no sigmoid of {figure}: {error.message}")
            continue
        scores.append(fit)
        if target is not None and loss is not None:
            predicted[figure] = fit.predict(law.draws([target])[:, 0], loss.value)
    return Forecast(
        fit=law, left_out=left_out, scores=scores, target=target, loss=loss, predicted_scores=predicted,
        measured_scores={name: own[-1].figures[name] for name in predicted if own and name in own[-1].figures},
        checked=compared(law, own) if own else None, notes=notes,
    )


def _own_points(points: Sequence[Point], rung: str | None) -> list[Point]:
    """The decayed points of the rung that is asked about, by tokens."""
    if rung is None:
        return []
    rungs = by_rung([point for point in points if point.is_decayed])
    if rung not in rungs:
        raise RecipeError(f"no rung {rung} has a loss", hint=f"there are: {', '.join(rungs)}")
    return rungs[rung]


def _require_on_line(form: fitting.LawForm, target: Size) -> None:
    """Raise DataError where the law says nothing about a target."""
    if form.line is not None and not form.is_on_line(target):
        raise DataError(
            f"every point has {form.line.words()}: nothing says what a model of {short(target.parameters)} reaches "
            f"after {short(target.tokens)} tokens",
            hint="ask for a size on that line, or train rungs at several multiples of tokens",
        )


def _far(points: Sequence[Point], target: Size) -> list[str]:
    most = max(point.size.flops for point in points)
    if target.flops <= FAR * most:
        return []
    times = f"{target.flops / most:,.0f} times the FLOPs of the largest point"
    return [f"the target has {times}: no rung that was left out tested such a distance"]
