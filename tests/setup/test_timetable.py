"""A run of hardly any steps is warned of, and a schedule that does not fit it, with what to change.

And the plan of a window, and the course of a run whose length its windows decide, or its duration.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.numbers import Duration
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.setup.timetable import FEW_STEPS, PortionPlans, Starts, few_steps, timetable
from tuner.train.plan import Plan, build_schedule, peak_factor, plan_steps, schedule_flaws


def planned(duration: str, rows: int, batch: int, micro: int = 1) -> tuple[Recipe, Plan]:
    train = {"duration": duration, "global_batch_size": batch, "micro_batch_size": micro}
    recipe = load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "train": train}).recipe
    return recipe, plan_steps(recipe.train.duration, np.full(rows, 100), batch)


@pytest.mark.parametrize(("duration", "rows", "batch", "expected"), cases(__file__, "few_steps_are_warned_of"))
def test_few_steps_are_warned_of(duration: str, rows: int, batch: int, expected: str | None) -> None:
    recipe, plan = planned(duration, rows, batch)
    warning = few_steps(recipe, plan)
    assert (warning is None) == (expected is None)
    if expected is not None:
        assert re.search(expected, str(warning)), warning


@pytest.mark.parametrize(
    ("rows", "batch", "micro", "expected"), [(150, 16, 4, 4), (230, 24, 4, 8), (20, 8, 4, None), (9, 4, 4, None)]
)
def test_the_batch_that_is_named_holds_whole_micro_batches(
    rows: int, batch: int, micro: int, expected: int | None
) -> None:
    recipe, plan = planned("1 epoch", rows, batch, micro)
    found = re.search(r"global_batch_size: (\d+)", str(few_steps(recipe, plan)))
    assert (None if found is None else int(found[1])) == expected


@pytest.mark.parametrize(("rows", "batch"), [(56, 16), (20, 16), (33, 4), (5, 16), (19, 2), (400, 64)])
def test_either_way_out_gives_enough_steps(rows: int, batch: int) -> None:
    recipe, plan = planned("1 epoch", rows, batch)
    warning = str(few_steps(recipe, plan))
    smaller = re.search(r"global_batch_size: (\d+)", warning)
    longer = re.search(r"duration: (\d+) epochs", warning)
    assert longer is not None and (smaller is None) == (rows < FEW_STEPS)
    assert plan_steps(Duration.parse(f"{longer[1]} epochs"), np.full(rows, 100), batch).total_steps >= FEW_STEPS
    if smaller is not None:
        assert plan_steps(Duration.parse("1 epoch"), np.full(rows, 100), int(smaller[1])).total_steps >= FEW_STEPS


def scheduled(schedule: dict[str, Any]) -> Recipe:
    recipe = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "schedule": schedule}
    return load_recipe(recipe).recipe


@pytest.mark.parametrize(("schedule", "steps"), cases(__file__, "a_schedule_that_fits_is_not_warned_of"))
def test_a_schedule_that_fits_is_not_warned_of(schedule: dict[str, Any], steps: int) -> None:
    section, tokens = scheduled(schedule).schedule, np.full(steps, 100)
    plan = Plan(steps, 1, steps, steps)
    assert schedule_flaws(section, plan, tokens) == []
    if schedule != {"kind": "wsd"} or steps > 1:  # in one step the warm-up and the fall are the same step
        assert peak_factor(build_schedule(section, plan, tokens), 1, steps) == pytest.approx(1, abs=0.11)


@pytest.mark.parametrize(("schedule", "steps", "expected", "peak"), cases(__file__, "flawed_schedules"))
def test_a_schedule_that_does_not_fit_is_warned_of_and_the_line_helps(
    schedule: dict[str, Any], steps: int, expected: str, peak: float
) -> None:
    section, tokens = scheduled(schedule).schedule, np.full(steps, 100)
    plan = Plan(steps, 1, steps, steps)
    (flaw,) = schedule_flaws(section, plan, tokens)
    assert re.search(expected, flaw), flaw
    assert peak_factor(build_schedule(section, plan, tokens), 1, steps) == pytest.approx(peak, abs=0.01)
    lines = dict(re.findall(r"schedule\.(\w+): ([^ ]+)", flaw.split("; write ")[1]))
    assert schedule_flaws(scheduled(schedule | lines).schedule, plan, tokens) == []


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
