"""Durations become steps; schedules at the points that matter, against transformers' own, and what holds for every
one of them.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import optimization

from tests.fixtures import tables
from tuner.config.numbers import Duration
from tuner.config.recipe import Schedule as Section
from tuner.config.recipe import TrainSection
from tuner.data.batch_sizes import BatchSizes
from tuner.errors import RecipeError
from tuner.train import plan as planning
from tuner.train.plan import WarmupDecay, build_schedule, cadence, mark_steps, plan_steps, steps_of

TOKENS = np.full(10, 100, dtype=np.int64)


@pytest.mark.parametrize(
    ("duration", "steps"),
    [("3 epochs", 9), ("0.5 epochs", 2), ("7 steps", 7), ("1000 tokens", 3), ("1001 tokens", 4), ("2000 tokens", 6)],
)
def test_length(duration: str, steps: int) -> None:
    plan = plan_steps(Duration.parse(duration), TOKENS, 4)
    assert (plan.steps_per_epoch, plan.total_steps) == (3, steps)


@pytest.mark.parametrize(("duration", "derivation"), tables.cases(__file__, "the_number_of_steps_is_derived"))
def test_the_number_of_steps_is_derived(duration: str, derivation: str) -> None:
    length = Duration.parse(duration)
    assert plan_steps(length, TOKENS, 4).derivation(length) == derivation
    packed = derivation.replace("10 rows", "10 packed rows")
    assert plan_steps(length, TOKENS, 4).derivation(length, "packed row") == packed


def sizes_of(*changes: str) -> BatchSizes:
    items = [{"after": change.partition(": ")[0], "size": int(change.partition(": ")[2])} for change in changes]
    section = TrainSection.model_validate({"global_batch_size": 4, "batch_schedule": items})
    found = planning.batch_sizes(section, TOKENS)
    assert found is not None
    return found


def test_a_run_whose_batches_grow() -> None:
    """Rows of the steps: 4 4 2 | 4 6 | 6 4 | 10 | 10."""
    sizes = sizes_of("1400 tokens: 6", "7 steps: 10")
    assert sizes.changes == ((4, 6), (7, 10))
    lengths = {"5 epochs": 9, "2.1 epochs": 6, "3000 tokens": 7, "2500 tokens": 6, "20 steps": 20}
    for text, steps in lengths.items():
        assert plan_steps(Duration.parse(text), TOKENS, 4, sizes).total_steps == steps, text
    length = Duration.parse("5 epochs")
    plan = plan_steps(length, TOKENS, 4, sizes)
    assert [plan.epoch_at(step) for step in range(10)] == [0, 0.4, 0.8, 1, 1.4, 2, 2.6, 3, 4, 5]
    expected = "5 epochs = 9 steps of 4 rows, 6 after step 4, 10 after step 7, 5.00 epochs of 10 rows"
    assert plan.derivation(length) == expected
    assert steps_of(Duration.parse("2 epochs"), plan, TOKENS) == 5
    due = cadence([Duration.parse("1 epoch"), Duration.parse("2 steps")], plan, TOKENS)
    assert due == planning.Cadence((2,), None, frozenset({3, 5, 7, 8, 9}))
    with pytest.raises(RecipeError, match="800 tokens is step 2, not after the change before it"):
        sizes_of("3 steps: 6", "800 tokens: 8")


def test_a_time_is_no_length() -> None:
    with pytest.raises(RecipeError, match="not a length"):
        plan_steps(Duration.parse("3 h"), TOKENS, 4)


def test_cadences() -> None:
    plan = plan_steps(Duration.parse("100 steps"), TOKENS, 4)
    assert steps_of(Duration.parse("3%"), plan, TOKENS) == 3
    both = cadence([Duration.parse("40 steps"), Duration.parse("2 min")], plan, TOKENS)
    assert both == planning.Cadence((40,), 120.0)
    assert [s for s in range(1, 101) if both.due_at(s)] == [40, 80]
    assert both.due_after(120.0)
    assert not both.due_after(119.9)
    points = replace(both, at_steps=frozenset({7, 40}))
    assert [s for s in range(1, 101) if points.due_at(s)] == [7, 40, 80]
    assert points.or_of(planning.Cadence((50,))) == planning.Cadence((40, 50), 120.0, frozenset({7, 40}))
    with pytest.raises(RecipeError, match=r"eval.marks: 120 steps is step 120, the run ends at 100"):
        mark_steps([Duration.parse("101 steps"), Duration.parse("120 steps")], plan, TOKENS, "eval.marks")
    never = cadence(None, plan, TOKENS)
    assert not never.due_at(40)
    assert not never.due_after(1e9)


SECTIONS: TypeAdapter[Any] = TypeAdapter(Section)
ROW_TOKENS = np.full(40, 100, dtype=np.int64)  # 10 steps an epoch, 400 tokens a step


def schedule(total: int, **section: Any) -> WarmupDecay:
    plan = plan_steps(Duration.parse(f"{total} steps"), ROW_TOKENS, 4)
    return build_schedule(SECTIONS.validate_python(section), plan, ROW_TOKENS)


def of_transformers(name: str, total: int, warmup: int) -> list[float]:
    """The factors that transformers' scheduler gives to its steps 0 to `total`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = optimization.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    factors = []
    for _ in range(total + 1):
        factors.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(("kind", "theirs"), tables.cases(__file__, "factors_are_those_of_transformers"))
def test_factors_are_those_of_transformers(kind: str, theirs: str) -> None:
    ours = schedule(99, kind=kind, warmup="10 steps")  # which ends at 0 one step after the run
    assert [ours.factor(i) for i in range(101)] == pytest.approx(of_transformers(theirs, 100, 10), abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_is_that_of_transformers(shape: str) -> None:
    ours = schedule(100, kind="wsd", warmup="10 steps", decay="20 steps", decay_shape=shape, min_lr_ratio=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = optimization.get_wsd_schedule(
        optimizer, 10, 20, num_training_steps=100, decay_type="1-sqrt" if shape == "sqrt" else shape, min_lr_ratio=0.1
    )
    for index in range(101):
        if index >= 10:  # theirs warms up from the floor
            assert ours.factor(index) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_wsd_s_of_three_periods() -> None:
    periods = ["1000 steps", "1000 steps", "2000 steps"]
    found = schedule(4000, kind="wsd_s", periods=periods, warmup="100 steps", decay="10%")
    indices = (0, 50, 100, 900, 950, 1000, 1001, 1950, 2000, 2001, 4000)
    assert [found.factor(i) for i in indices] == [0, 0.5, 1, 1, 0.5, 0, 1, 0.5, 0, 1, 0]
    assert [found.factor(i) for i in (3800, 3801, 3900)] == pytest.approx([1, 0.995, 0.5])


def test_periods_have_peaks_of_their_own() -> None:
    keys = {"periods": ["1000 steps", "2000 steps"], "warmup": "100 steps", "decay": "10%", "min_lr_ratio": 0.5}
    found = schedule(3000, kind="wsd_s", peaks=[0.8, 0.5], **keys)
    indices = (0, 50, 100, 900, 950, 1000, 1001, 2800, 2900, 3000)
    expected = [0, 0.4, 0.8, 0.8, 0.6, 0.4, 0.5, 0.5, 0.375, 0.25]
    assert [found.factor(i) for i in indices] == pytest.approx(expected)
    with pytest.raises(ValueError, match="got 1 peaks for 2 periods: each has its own"):
        schedule(3000, kind="wsd_s", peaks=[0.8], **keys)


def test_periods_cover_the_run() -> None:
    with pytest.raises(RecipeError, match="end after 30 steps, the run has 31"):
        schedule(31, kind="wsd_s", periods=["1 epoch", "2 epochs"])
    cut = schedule(29, kind="wsd_s", periods=["1 epoch", "2 epochs"], decay="4 steps", warmup="never")
    assert [cut.factor(i) for i in (10, 11, 29)] == [0, 1, 0.25]


def test_no_step_is_trained_at_0_and_a_floor_is_reached() -> None:
    for kind in ("linear", "cosine", "wsd"):
        assert 0 < schedule(100, kind=kind).factor(100) < 0.1, kind
        assert schedule(100, kind=kind, min_lr_ratio=0.25).factor(100) == 0.25, kind


def test_a_decay_has_its_steps_with_and_without_a_floor() -> None:
    for floor in (0.0, 0.5):
        found = schedule(100, kind="wsd", decay="10 steps", min_lr_ratio=floor)
        assert [found.factor(i) < 1 for i in range(89, 101)] == [False] * 2 + [True] * 10


@pytest.mark.parametrize("warmup", ["20 steps", "8000 tokens", "10%"])
def test_warmup_in_every_unit(warmup: str) -> None:
    found = schedule(200, kind="constant", warmup=warmup)
    assert [found.factor(i) for i in (0, 1, 10, 20, 200)] == [0, 0.05, 0.5, 1, 1]


def test_no_warmup_and_one_longer_than_the_run() -> None:
    assert schedule(10, kind="constant", warmup="never").factor(0) == 1
    assert [schedule(10, kind="cosine", warmup="40 steps").factor(i) for i in (1, 10)] == [1 / 40, 1 / 4]


ANY = st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd", "wsd_s"])


@given(
    ANY, st.integers(2, 400), st.integers(1, 500), st.integers(1, 400), st.sampled_from(["linear", "sqrt", "cosine"])
)
def test_a_factor_is_between_0_and_1_and_jumps_at_restarts_alone(
    kind: str, total: int, warmup: int, decay: int, shape: str
) -> None:
    section: dict[str, Any] = {"kind": kind, "warmup": f"{warmup} steps"}
    first = max(1, total // 3)
    if kind.startswith("wsd"):
        section |= {"decay": f"{decay} steps", "decay_shape": shape}
    if kind == "wsd_s":
        section["periods"] = [f"{first} steps", f"{total} steps"]
    found = schedule(total, **section)
    factors = [found.factor(i) for i in range(total + 1)]
    assert all(0 <= f <= 1 for f in factors)
    assert factors[1] > 0 or found.falls[0].end == 1
    begun = min([warmup, *(max(1, fall.end - fall.start) for fall in found.falls)])
    steepest = 1 / begun if shape == "linear" and kind.startswith("wsd") else math.pi / 2 / begun
    restarts = {first + 1} if kind == "wsd_s" else set()
    for index in range(1, total + 1):
        change = factors[index] - factors[index - 1]
        if index in restarts:
            assert change >= 0
        elif shape != "sqrt" or not kind.startswith("wsd"):
            assert abs(change) <= steepest + 1e-9, index
        if index > warmup and index not in restarts:
            assert change <= 1e-12, index
