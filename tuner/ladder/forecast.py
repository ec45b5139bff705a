"""What a ladder says about a size that was not trained: the law, its error on rungs left out, losses and scores.

Each rung is predicted from the others: the error that says what an extrapolation is worth, unlike R squared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tuner.errors import DataError, RecipeError
from tuner.ladder.fit import NEEDED_SIZES, Estimate, LawFit, LawForm, Settings, fit_law, form_of, interval
from tuner.ladder.points import LOSS, Point, Size, by_rung, require_figure, short, with_figure
from tuner.ladder.score import ScoreFit, fit_score

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


def held_out(points: Sequence[Point], figure: str, settings: Settings, form: LawForm) -> list[LadderHeldOut]:
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
    low, high = interval(np.log(fit.draws(sizes)), ONE_SIGMA)
    deviations = float(np.median(np.abs(measured - middle) / np.maximum((high - low) / 2, 1e-12)))
    last = own[-1]
    return LadderHeldOut(last.rung, sizes[-1], last.figures[fit.figure], fit.predict(sizes[-1:])[0], deviations)


def widening(left: Sequence[LadderHeldOut]) -> float:
    """How many times wider than their residuals the points' noise has to be for the rungs that were left out.

    Residuals do not show noise that all marks of a rung share, nor where the law is not the truth: errors on rungs that
    were left out show both.
    """
    if not left:
        return 1.0
    return max(1.0, math.sqrt(sum(one.deviations**2 for one in left) / len(left)))


def fit_widened(
    points: Sequence[Point], figure: str, settings: Settings, needed: int
) -> tuple[LawFit, list[LadderHeldOut]]:
    """The law with intervals as wide as the errors on left-out rungs ask, and these. Raises DataError for too few."""
    form = form_of(points, needed)
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
    if len(decayed) < len(rest):
        notes.append(
            f"{len(rest) - len(decayed)} points before the decay of the learning rate are not fitted by the law"
        )
    target = own[-1].size if own else question.size
    if target is not None:
        _require_on_line(form_of(decayed), target)
        notes += _far(decayed, target)
    for figure in question.scores:
        require_figure(rest, figure)  # a misspelt one is said before the fit, which takes seconds
    law, left_out = fit_widened(decayed, question.loss, question.settings, NEEDED_SIZES)
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
        fit=law,
        left_out=left_out,
        scores=scores,
        target=target,
        loss=loss,
        predicted_scores=predicted,
        measured_scores={name: own[-1].figures[name] for name in predicted if own and name in own[-1].figures},
        checked=compared(law, own) if own else None,
        notes=notes,
    )


def _own_points(points: Sequence[Point], rung: str | None) -> list[Point]:
    """The decayed points of the rung that is asked about, by tokens."""
    if rung is None:
        return []
    rungs = by_rung([point for point in points if point.is_decayed])
    if rung not in rungs:
        raise RecipeError(f"no rung {rung} has a loss", hint=f"there are: {', '.join(rungs)}")
    return rungs[rung]


def _require_on_line(form: LawForm, target: Size) -> None:
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
