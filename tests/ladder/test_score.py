"""From a loss to a score."""

from dataclasses import replace

import numpy as np
import pytest

from tests.ladder import made
from tuner.errors import DataError, RecipeError
from tuner.ladder.fit import Settings
from tuner.ladder.forecast import Sigmoid, fit_score, sigmoid_parameters
from tuner.ladder.points import Point

FEW = Settings(samples=100)
TRUTH = made.Truth()
POINTS = made.ladder(TRUTH)


def test_derivatives_are_those_of_differences() -> None:
    made.require_derivatives(Sigmoid(np.full(4, -9.0), np.full(4, 9.0), np.linspace(-2, 2, 9)), [0.3, 0.5, 0.2, 0.9])


def test_a_known_sigmoid_comes_back() -> None:
    fit = fit_score(made.with_scores(POINTS), "loss", "task/acc", FEW, None)
    found = {one.name: one.value.value for one in sigmoid_parameters(fit)}
    assert [found[name] for name in ("middle", "k", "floor", "ceiling")] == pytest.approx(
        [2.6, 5, 0.25, 0.95], rel=0.01
    )


def test_the_score_of_a_loss_has_the_interval_of_both_steps() -> None:
    fit = fit_score(made.with_scores(POINTS, noise=0.005), "loss", "task/acc", FEW, 0.25)
    exact = fit.predict(np.full(100, 2.3), 2.3)
    vague = fit.predict(np.linspace(2.1, 2.5, 100), 2.3)
    assert exact.value == vague.value == pytest.approx(made.accuracy(2.3), abs=0.02)
    assert vague.high - vague.low > 2 * (exact.high - exact.low)
    assert 0 <= vague.low <= vague.high <= 1


def test_points_before_the_decay_count() -> None:
    points = [replace(point, is_decayed=False) for point in made.with_scores(POINTS)]
    assert len(fit_score(points, "loss", "task/acc", FEW, None).points) == len(POINTS)


def test_a_ceiling_that_no_point_comes_near_is_not_identified() -> None:
    worse = [point for point in made.with_scores(POINTS, noise=0.001) if point.figures["loss"] > 2.75]
    found = {one.name: one for one in sigmoid_parameters(fit_score(worse, "loss", "task/acc", FEW, 0.25))}
    assert found["ceiling"].why == found["middle"].why == "no point is past the middle of the sigmoid"


def scored(scores: list[float]) -> list[Point]:
    losses = np.linspace(4, 3, len(scores))
    return [Point("r", 1e6, 1e7, {"loss": float(x), "s": y}) for x, y in zip(losses, scores, strict=True)]


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ([0.25, 0.26, 0.24, 0.25, 0.26, 0.24, 0.25, 0.25], DataError, "a constant fits it as well"),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], DataError, "it falls where the loss falls"),
        ([0.1, 0.2, 0.3, 0.4, 0.5], DataError, "5 points have s and loss"),
        ([25.0, 26.0, 30.0, 40.0, 50.0, 60.0], RecipeError, "no share between 0 and 1"),
    ],
)
def test_scores_that_say_nothing_are_refused(scores: list[float], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit_score(scored(scores), "loss", "s", FEW, None)
