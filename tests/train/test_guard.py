"""The guard: what is left out, when the run must end, and what survives a resume."""

import json
import math

import numpy as np
import pytest
import torch

from tuner.train.guard import Guard, GuardLimits

CPU = torch.device("cpu")


def judged(guard: Guard, values: list[tuple[float, float]]) -> list[tuple[bool, bool]]:
    found = []
    for loss, norm in values:
        skip, shut = guard.judge(torch.tensor([loss, norm], dtype=torch.float64))
        found.append((bool(skip), bool(shut)))
    return found


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_the_first_step_that_is_not_finite_shuts_the_guard_for_good(bad: tuple[float, float]) -> None:
    assert judged(Guard(CPU), [(2.0, 1.0), bad, (2.0, 1.0)]) == [(False, False), (True, True), (True, True)]


def test_as_many_as_allowed_are_left_out_and_one_more_shuts() -> None:
    nan = (math.nan, 1.0)
    guard = Guard(CPU, GuardLimits(nonfinite_skips=2))
    assert judged(guard, [nan, (1.0, 1.0), nan, (1.0, 1.0), nan]) == [
        (True, False), (False, False), (True, False), (False, False), (True, True),
    ]
    assert guard.as_state() == {"judged": 5, "nonfinite": 3, "skipped": 3}


@pytest.mark.parametrize("window", [128, 32])
def test_spikes_are_those_of_the_last_steps_by_numpy(window: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal([3.0, 1.0], [0.1, 0.2], (400, 2))
    values[200, 0] += 1.0  # a loss 10 sigmas high
    values[300, 1] += 3.0  # a norm 15 sigmas high
    values[310] -= 2.0  # far below: no spike
    values[350, 0] = math.nan
    guard = Guard(CPU, GuardLimits(nonfinite_skips=5, spike_sigmas=8.0, window=window))
    found = [skip for skip, _ in judged(guard, [tuple(v) for v in values])]
    recent: list[np.ndarray] = []
    wanted = []
    for value in values:
        finite = bool(np.isfinite(value).all())
        last = np.array(recent[-window:])
        spike = len(recent) >= window and bool((value > last.mean(0) + 8 * last.std(0, ddof=1)).any())
        wanted.append(spike or not finite)
        recent.append(value if finite else recent[-1])
    assert found == wanted
    assert [i for i, skip in enumerate(found) if skip] == [200, 300, 350]


def test_nothing_is_a_spike_before_there_is_a_whole_window() -> None:
    values = [(3.0, 1.0)] * 127 + [(30.0, 1.0)]
    assert not any(skip for skip, _ in judged(Guard(CPU, GuardLimits(spike_sigmas=3.0)), values))


def test_an_update_with_a_larger_norm_than_allowed_is_left_out() -> None:
    guard = Guard(CPU, GuardLimits(most_norm=2.0))
    assert [skip for skip, _ in judged(guard, [(9.0, 2.0), (1.0, 2.1), (1.0, 0.5)])] == [False, True, False]


def test_a_restored_guard_goes_on_as_the_first_would_have() -> None:
    rng = np.random.default_rng(1)
    values = [tuple(v) for v in rng.normal(3.0, 0.5, (300, 2)) + (rng.random((300, 1)) > 0.97) * 4.0]
    whole, first, second = (Guard(CPU, GuardLimits(nonfinite_skips=1, spike_sigmas=3.0)) for _ in range(3))
    expected = judged(whole, values)
    before = judged(first, values[:170])
    state = json.loads(json.dumps(first.as_state()))
    assert second.restore(state) == sum(skip for skip, _ in before)
    assert before + judged(second, values[170:]) == expected
    assert any(skip for skip, _ in expected[170:]), "the seed must plant a spike after the restore"
    assert second.as_state() == whole.as_state()
