"""The scale of the loss: torch's rule, its floor, and whose turn a bad step is."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.train import loss_scale
from tuner.train.guard import Guard, GuardLimits
from tuner.train.loss_scale import FLOOR, INITIAL, LossScale

CPU = torch.device("cpu")
FINE, TOO_LARGE, NO_NUMBER = (2.0, 1.0), (2.0, math.inf), (math.nan, math.nan)


def take(scale: LossScale, guard: Guard, step: tuple[float, float]) -> tuple[bool, bool]:
    """Whether an update of this loss and norm is left out, and whether the run ends."""
    values = torch.tensor(step, dtype=torch.float64)
    skip, halt = guard.judge(values, scale.judge(*values.unbind()))
    return bool(skip), bool(halt)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=30))
def test_it_grows_and_shrinks_as_torchs_scaler_does(overflows: list[bool]) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    ours, guard = LossScale(CPU), Guard(CPU)
    ours.state[0] = 2.0**40
    with patch.object(loss_scale, "INTERVAL", 3):
        for overflow in overflows:
            theirs.scale(torch.zeros(1))
            parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
            theirs.step(optimizer)
            theirs.update()
            assert take(ours, guard, TOO_LARGE if overflow else FINE) == (overflow, False)
            assert (float(ours.scale), int(ours.state[1])) == (theirs.get_scale(), theirs._get_growth_tracker())


def test_the_scale_falls_to_its_floor_and_only_then_ends_the_run() -> None:
    scale, guard = LossScale(CPU), Guard(CPU)
    found = [take(scale, guard, TOO_LARGE) for _ in range(17)]
    assert found == [(True, False)] * 16 + [(True, True)]
    assert float(scale.scale) == FLOOR
    assert take(scale, guard, FINE) == (True, True), "nothing is updated after that"


def test_steps_without_a_number_are_the_guards_and_leave_the_scale() -> None:
    scale, guard = LossScale(CPU), Guard(CPU, GuardLimits(nonfinite_skips=1))
    found = [take(scale, guard, one) for one in (FINE, NO_NUMBER, FINE)]
    assert found == [(False, False), (True, False), (False, False)]
    assert (float(scale.scale), float(scale.state[1])) == (INITIAL, 2)
    assert take(scale, guard, TOO_LARGE) == (True, False)
    assert guard.as_state() == {"judged": 4, "nonfinite": 1, "skipped": 2}
    assert take(scale, guard, NO_NUMBER) == (True, True)


def test_an_overflow_is_no_usual_norm() -> None:
    guard = Guard(CPU, GuardLimits(spike_sigmas=6.0))
    scale = LossScale(CPU)
    take(scale, guard, FINE)
    take(scale, guard, TOO_LARGE)
    assert torch.tensor(guard.as_state()["recent"]).isfinite().all()


def test_it_never_grows_to_infinity() -> None:
    scale, guard = LossScale(CPU), Guard(CPU)
    scale.state[0] = 2.0**127
    with patch.object(loss_scale, "INTERVAL", 1):
        take(scale, guard, FINE)
    assert float(scale.scale) == 2.0**127


@pytest.mark.parametrize(("counts", "share"), [({"tokens": 40.0}, 40), ({}, 1), ({"tokens": 0.0}, 1)])
def test_what_reaches_a_term_is_known_before_the_forward_pass(counts: dict[str, float], share: float) -> None:
    scale = LossScale(CPU)
    scale.begin(counts)
    assert float(scale.of_term()) == pytest.approx(INITIAL / share)
