"""Each rung predicted from the others."""

from dataclasses import replace

import pytest

from tests.ladder import made
from tuner.ladder.fit import NEEDED_SIZES, Estimate, Settings, fit_law
from tuner.ladder.forecast import LadderHeldOut, fit_widened, widening
from tuner.ladder.points import Size

FEW = Settings(samples=40)
TRUTH = made.Truth()


def one(deviations: float) -> LadderHeldOut:
    return LadderHeldOut("1M", Size(1e6, 2e7), 3.0, Estimate(3.03, 2.9, 3.1), deviations)


def test_the_error_is_predicted_over_measured() -> None:
    assert one(1.0).error == pytest.approx(0.01)


def test_noise_is_never_made_smaller_and_grows_with_the_errors() -> None:
    assert widening([]) == 1
    assert widening([one(0.1), one(0.2)]) == 1
    assert widening([one(3.0), one(4.0)]) == pytest.approx(12.5**0.5)


def test_every_rung_is_predicted_from_the_others() -> None:
    _, left_out = fit_widened(made.ladder(TRUTH, noise=0.002), "loss", FEW, NEEDED_SIZES)
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
    fit, _ = fit_widened(off, "loss", FEW, NEEDED_SIZES)
    plain = fit_law(off, "loss", FEW, NEEDED_SIZES)
    assert fit.noise.scale > 2
    large = Size(13e9, 260e9)
    wide, narrow = fit.predict([large])[0], plain.predict([large])[0]
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_four_sizes_are_enough_to_leave_one_out() -> None:
    _, left_out = fit_widened(made.ladder(TRUTH, noise=0.002, sizes=made.SIZES[:4]), "loss", FEW, NEEDED_SIZES)
    assert len(left_out) == 4
