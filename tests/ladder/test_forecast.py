"""The whole answer: a rung predicted from the others, a size that nobody trained, and the scores of both.

And from a loss to a score.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.ladder import made
from tuner.errors import DataError, RecipeError
from tuner.ladder import forecast as forecasting
from tuner.ladder.fit import NEEDED_SIZES, Estimate, Settings, fit_law
from tuner.ladder.forecast import ForecastQuestion, LadderHeldOut, fit_score, fit_widened, forecast
from tuner.ladder.points import Point, Size, read_points

FEW, SOME, FEWER, FEWEST = (Settings(samples=count) for count in (200, 100, 40, 20))
"""The fewest where no interval is looked at."""
TRUTH = made.Truth()


def test_published_models_predict_the_largest_of_them_and_its_score() -> None:
    found = forecast(read_points(made.CEREBRAS), ForecastQuestion(FEW, rung="13B", scores=("average",)))
    assert found.checked is not None and found.loss is not None
    assert abs(found.checked.error) < 0.02
    assert found.loss.low <= 1.572 <= found.loss.high
    assert found.target == Size(13e9, 257.1e9)
    assert found.predicted_scores["average"].value == pytest.approx(0.570, abs=0.03)
    assert found.predicted_scores["average"].low <= 0.570 <= found.predicted_scores["average"].high
    assert found.measured_scores == {"average": 0.57}
    assert "13B" not in {point.rung for point in found.fit.points}


def test_a_size_that_nobody_trained() -> None:
    points = made.with_scores(made.ladder(TRUTH, noise=0.002), noise=0.005)
    size = Size(7e9, 140e9)
    found = forecast(points, ForecastQuestion(FEW, size=size, scores=("task/acc",), chance=0.25))
    truth = TRUTH.loss(size.parameters, size.tokens)
    assert found.loss is not None and found.checked is None
    assert found.loss.value == pytest.approx(truth, rel=0.01)
    assert found.loss.low <= truth <= found.loss.high
    assert found.predicted_scores["task/acc"].low <= made.accuracy(truth) <= found.predicted_scores["task/acc"].high
    assert found.notes == []


def test_points_before_the_decay_are_not_fitted_by_the_law() -> None:
    points = made.with_scores(made.ladder(TRUTH))
    early = [
        replace(point, is_decayed=False, figures={**point.figures, "loss": point.figures["loss"] * 1.1})
        for point in points
    ]
    found = forecast([*points, *early], ForecastQuestion(FEWEST, scores=("task/acc",)))
    assert len(found.fit.points) == len(points)
    assert len(found.scores[0].points) == 2 * len(points)
    assert found.notes == ["24 points before the decay of the learning rate are not fitted by the law"]


def test_a_far_target_and_a_missing_loss_are_said() -> None:
    points = made.ladder(TRUTH, noise=0.002)
    points[0] = replace(points[0], figures={})
    found = forecast(points, ForecastQuestion(FEWEST, size=Size(70e9, 1.4e12)))
    assert found.notes[0] == "1 points have no finite loss above 0 and are left out"
    assert "times the FLOPs of the largest point" in found.notes[1]


def test_scores_before_their_knee_leave_the_loss_predicted() -> None:
    points = [
        replace(point, figures={**point.figures, "s": 0.25 + 0.01 * (i % 2)})
        for i, point in enumerate(made.ladder(TRUTH, noise=0.002))
    ]
    found = forecast(points, ForecastQuestion(FEWEST, size=Size(7e9, 140e9), scores=("s",)))
    assert found.loss is not None
    assert found.predicted_scores == {}
    assert found.notes[0].startswith("no sigmoid of s: s is 0.25 to 0.26, and a constant fits it as well")


def test_a_target_off_the_line_of_the_points_is_refused() -> None:
    with pytest.raises(DataError, match=r"every point has 20\.4 tokens per parameter: nothing says"):
        forecast(read_points(made.CEREBRAS), ForecastQuestion(FEWEST, size=Size(13e9, 2e12)))


def test_a_rung_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match="no rung 2B has a loss") as caught:
        forecast(made.ladder(TRUTH), ForecastQuestion(FEWEST, rung="2B"))
    assert caught.value.hint == "there are: 60M, 100M, 190M, 370M, 760M, 1.3B"


def one(deviations: float) -> LadderHeldOut:
    return LadderHeldOut("1M", Size(1e6, 2e7), 3.0, Estimate(3.03, 2.9, 3.1), deviations)


def test_the_error_is_predicted_over_measured() -> None:
    assert one(1.0).error == pytest.approx(0.01)


def test_noise_is_never_made_smaller_and_grows_with_the_errors() -> None:
    assert forecasting.widening([]) == 1
    assert forecasting.widening([one(0.1), one(0.2)]) == 1
    assert forecasting.widening([one(3.0), one(4.0)]) == pytest.approx(12.5**0.5)


def test_every_rung_is_predicted_from_the_others() -> None:
    _, left_out = fit_widened(made.ladder(TRUTH, noise=0.002), "loss", FEWER, NEEDED_SIZES)
    assert [one.rung for one in left_out] == ["60M", "100M", "190M", "370M", "760M", "1.3B"]
    assert max(abs(one.error) for one in left_out) < 0.01
    assert left_out[-1].size == Size(1.3e9, 4 * 20 * 1.3e9)


def test_a_rung_that_is_off_widens_the_intervals() -> None:
    """All marks of one rung are off by the same: the residuals of a fit with it barely show that."""
    points = made.ladder(TRUTH, noise=0.0005)
    off = [
        replace(point, figures={"loss": point.figures["loss"] * 1.03}) if point.rung == "190M" else point
        for point in points
    ]
    fit, _ = fit_widened(off, "loss", FEWER, NEEDED_SIZES)
    plain = fit_law(off, "loss", FEWER, NEEDED_SIZES)
    assert fit.noise.scale > 2
    large = Size(13e9, 260e9)
    wide, narrow = fit.predict([large])[0], plain.predict([large])[0]
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_four_sizes_are_enough_to_leave_one_out() -> None:
    _, left_out = fit_widened(made.ladder(TRUTH, noise=0.002, sizes=made.SIZES[:4]), "loss", FEWER, NEEDED_SIZES)
    assert len(left_out) == 4


POINTS = made.ladder(TRUTH)


def test_derivatives_are_those_of_differences() -> None:
    sigmoid = forecasting.Sigmoid(np.full(4, -9.0), np.full(4, 9.0), np.linspace(-2, 2, 9))
    made.require_derivatives(sigmoid, [0.3, 0.5, 0.2, 0.9])


def test_a_known_sigmoid_comes_back() -> None:
    fit = fit_score(made.with_scores(POINTS), "loss", "task/acc", SOME, None)
    found = {one.name: one.value.value for one in forecasting.sigmoid_parameters(fit)}
    assert [found[name] for name in ("middle", "k", "floor", "ceiling")] == pytest.approx(
        [2.6, 5, 0.25, 0.95], rel=0.01
    )


def test_the_score_of_a_loss_has_the_interval_of_both_steps() -> None:
    fit = fit_score(made.with_scores(POINTS, noise=0.005), "loss", "task/acc", SOME, 0.25)
    exact = fit.predict(np.full(100, 2.3), 2.3)
    vague = fit.predict(np.linspace(2.1, 2.5, 100), 2.3)
    assert exact.value == vague.value == pytest.approx(made.accuracy(2.3), abs=0.02)
    assert vague.high - vague.low > 2 * (exact.high - exact.low)
    assert 0 <= vague.low <= vague.high <= 1


def test_points_before_the_decay_count() -> None:
    points = [replace(point, is_decayed=False) for point in made.with_scores(POINTS)]
    assert len(fit_score(points, "loss", "task/acc", SOME, None).points) == len(POINTS)


def test_a_ceiling_that_no_point_comes_near_is_not_identified() -> None:
    worse = [point for point in made.with_scores(POINTS, noise=0.001) if point.figures["loss"] > 2.75]
    found = {one.name: one for one in forecasting.sigmoid_parameters(fit_score(worse, "loss", "task/acc", SOME, 0.25))}
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
        fit_score(scored(scores), "loss", "s", SOME, None)
