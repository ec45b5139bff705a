"""Each rung predicted from the others: the error that says what an extrapolation is worth, unlike R squared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.errors import DataError
from tuner.ladder.fit import Estimate, LawFit, Settings, fit_law, interval
from tuner.ladder.law import LawForm, form_of
from tuner.ladder.points import Point, Size, by_rung

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
