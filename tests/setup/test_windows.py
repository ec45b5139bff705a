"""The plan of a window, and the course of a run whose length its windows decide, or its duration."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.config.load import load_recipe
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.setup.timetable import PortionPlans, Starts, timetable


def recipe(duration: str = "1 epoch", **more: Any) -> Recipe:
    tree = {
        "model": {"name_or_path": "owner/name"},
        "data": {"train": "logs", "windows": {"files": 1}, "max_length": 64},
        "train": {"duration": duration, "global_batch_size": 4},
        "schedule": {"kind": "constant", "warmup": "2 steps"},
        "optimizer": {"lr": 1e-3},
        **more,
    }
    return load_recipe(tree).recipe


def plans(recipe: Recipe) -> PortionPlans:
    resolved: Any = SimpleNamespace(recipe=recipe)
    return PortionPlans(resolved)


class Rows:
    def __init__(self, count: int) -> None:
        self.tokens_per_row = np.full(count, 60, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens_per_row)


def course(recipe: Recipe, count: int, first: int) -> Any:
    resolved: Any = SimpleNamespace(recipe=recipe)
    return timetable(resolved, SimpleNamespace(train=Rows(count), eval=recipe.data.eval), Starts(data=first))  # type: ignore[arg-type]


def test_a_window_begins_where_the_one_before_it_ended() -> None:
    plan = plans(recipe()).plan(rows=10, first_step=7)
    assert (plan.rows, plan.steps_per_epoch, plan.total_steps) == (10, 3, 10)
    assert plans(recipe("2 epochs")).plan(10, 7).total_steps == 13
    assert plans(recipe()).limit is None


def test_a_duration_ends_the_run_within_a_window() -> None:
    assert plans(recipe("8 steps")).limit == 8
    assert plans(recipe("8 steps")).plan(10, 7).total_steps == 8
    assert plans(recipe(f"{4 * 64 * 5} tokens")).limit == 5  # counted in full rows


@settings(deadline=None, max_examples=30)
@given(windows=st.lists(st.integers(1, 40), min_size=1, max_size=8), limit=st.integers(1, 60))
def test_windows_follow_each_other_without_a_gap(windows: list[int], limit: int) -> None:
    bounded, step = recipe(f"{limit} steps"), 0
    for count in windows:
        plan = plans(bounded).plan(count, step)
        assert plan.total_steps == min(step + -(-count // 4), limit)
        step = plan.total_steps


def test_a_constant_schedule_needs_no_length() -> None:
    early, late = course(recipe(), 8, 0), course(recipe(), 40, 100)
    assert [early.schedule.factor(i) for i in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert [late.schedule.factor(i) for i in (1, 2, 120)] == [0.5, 1.0, 1.0]
    assert (early.data_start, late.data_start) == (0, 100)
    assert late.plan.total_steps == 110


def test_the_learning_rate_does_not_depend_on_the_window() -> None:
    falling = recipe("100 steps", schedule={"kind": "cosine", "warmup": "10%"})
    early, late = course(falling, 8, 0), course(falling, 200, 30)
    assert [early.schedule.factor(i) for i in range(101)] == [late.schedule.factor(i) for i in range(101)]
    slow = recipe(schedule={"kind": "inverse_sqrt", "warmup": "5 steps"})
    assert [course(slow, 8, 0).schedule.factor(i) for i in range(99)] == [
        course(slow, 9, 50).schedule.factor(i) for i in range(99)
    ]


def test_cadences_count_full_rows_and_shares_need_a_length() -> None:
    saving = {"checkpoint": {"every": [f"{4 * 64 * 3} tokens", "7 steps"]}}
    assert course(recipe(**saving), 8, 0).saving.every_steps == (3, 7)
    held = {"data": {"train": "logs", "eval": "eval.jsonl", "windows": {"files": 1}, "max_length": 64}}
    assert course(recipe(**held), 8, 0).evaluation.every_steps == ()  # its default is a share
    assert course(recipe("50 steps", **held), 8, 0).evaluation.every_steps == (5,)
    assert course(recipe(checkpoint={"marks": ["900 steps"]}), 8, 0).keeping.at_steps == {900}
    with pytest.raises(RecipeError, match="900 steps is step 900, the run ends at 50"):
        course(recipe("50 steps", checkpoint={"marks": ["900 steps"]}), 8, 0)


def test_timetable_takes_this_course_where_there_are_windows() -> None:
    table = course(recipe(), 8, 3)
    assert (table.plan.total_steps, table.data_start) == (5, 3)
    assert plans(recipe()).words(table.plan, 3) == "8 rows / 4 = steps 4 to 5"
    assert plans(recipe("9 steps")).words(table.plan, 3) == "8 rows / 4 = steps 4 to 5 of at most 9"


def test_a_reference_for_all_data_is_refused_once_it_is_resolved() -> None:
    plans(recipe()).check()
    with pytest.raises(RecipeError, match="before the first step"):
        plans(recipe().model_copy(update={"method": SimpleNamespace(reference="columns")})).check()
