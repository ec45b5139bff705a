"""Schedules at the points that matter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.train.schedule import Schedule


@pytest.mark.parametrize(
    ("index", "factor"), [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5 * (1 + math.cos(math.pi / 2))), (100, 0.0)]
)
def test_cosine(index: int, factor: float) -> None:
    assert Schedule("cosine", 100, 10).factor(index) == pytest.approx(factor, abs=1e-12)


def test_linear_ends_at_its_floor() -> None:
    schedule = Schedule("linear", 100, 0, min_ratio=0.1)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(50) == pytest.approx(0.55)
    assert schedule.factor(100) == pytest.approx(0.1)


def test_constant_stays() -> None:
    assert [Schedule("constant", 100, 4).factor(i) for i in (0, 1, 4, 99, 100)] == [0.0, 0.25, 1.0, 1.0, 1.0]


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 500), st.integers(0, 500), st.floats(0, 1))
def test_a_factor_is_between_0_and_1_and_never_rises_after_the_warmup(
    kind: str, total: int, warmup: int, floor: float
) -> None:
    schedule = Schedule(kind, total, min(warmup, total), floor)  # type: ignore[arg-type]
    factors = [schedule.factor(i) for i in range(total + 1)]
    assert all(0 <= f <= 1 for f in factors)
    assert factors[1] > 0 or total == 1 or floor == 0
    after = factors[schedule.warmup_steps :]
    assert all(b <= a + 1e-12 for a, b in zip(after, after[1:], strict=False))
