"""A run of hardly any steps is warned of, and a schedule that does not fit it, with what to change."""

import re
from typing import Any

import numpy as np
import pytest

from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.numbers import Duration
from tuner.config.recipe import Recipe
from tuner.setup.timetable import FEW_STEPS, few_steps
from tuner.train.plan import Plan, plan_steps
from tuner.train.schedule import build_schedule, peak_factor, schedule_flaws


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
