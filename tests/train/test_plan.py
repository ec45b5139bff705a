"""Durations become steps."""

from dataclasses import replace

import numpy as np
import pytest

from tests.fixtures import tables
from tuner.config.numbers import Duration
from tuner.config.recipe import TrainSection
from tuner.data.batch_sizes import BatchSizes
from tuner.errors import RecipeError
from tuner.train.plan import Cadence, batch_sizes, cadence, mark_steps, plan_steps, steps_of

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
    found = batch_sizes(section, TOKENS)
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
    assert due == Cadence((2,), None, frozenset({3, 5, 7, 8, 9}))
    with pytest.raises(RecipeError, match="800 tokens is step 2, not after the change before it"):
        sizes_of("3 steps: 6", "800 tokens: 8")


def test_a_time_is_no_length() -> None:
    with pytest.raises(RecipeError, match="not a length"):
        plan_steps(Duration.parse("3 h"), TOKENS, 4)


def test_cadences() -> None:
    plan = plan_steps(Duration.parse("100 steps"), TOKENS, 4)
    assert steps_of(Duration.parse("3%"), plan, TOKENS) == 3
    both = cadence([Duration.parse("40 steps"), Duration.parse("2 min")], plan, TOKENS)
    assert both == Cadence((40,), 120.0)
    assert [s for s in range(1, 101) if both.due_at(s)] == [40, 80]
    assert both.due_after(120.0)
    assert not both.due_after(119.9)
    points = replace(both, at_steps=frozenset({7, 40}))
    assert [s for s in range(1, 101) if points.due_at(s)] == [7, 40, 80]
    assert points.or_of(Cadence((50,))) == Cadence((40, 50), 120.0, frozenset({7, 40}))
    with pytest.raises(RecipeError, match=r"eval.marks: 101 steps is step 101, the run ends at 100"):
        mark_steps([Duration.parse("101 steps")], plan, TOKENS, "eval.marks")
    never = cadence(None, plan, TOKENS)
    assert not never.due_at(40)
    assert not never.due_after(1e9)
