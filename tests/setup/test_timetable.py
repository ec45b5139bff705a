"""A run of hardly any steps is warned of, with what to change."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tuner.config.duration import Duration
from tuner.config.load import load_recipe
from tuner.config.recipe import Recipe
from tuner.setup.timetable import FEW_STEPS, few_steps
from tuner.train.plan import Plan, plan_steps


def planned(duration: str, rows: int, batch: int, micro: int = 1) -> tuple[Recipe, Plan]:
    train = {"duration": duration, "global_batch_size": batch, "micro_batch_size": micro}
    recipe = load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "train": train}).recipe
    return recipe, plan_steps(recipe.train.duration, np.full(rows, 100), batch)


@pytest.mark.parametrize(
    ("duration", "rows", "batch", "expected"),
    [
        (
            "1 epoch",
            56,
            16,
            "is 4 steps, which .* train.global_batch_size: 2 or train.duration: 5 epochs, or take more",
        ),
        ("3 epochs", 20, 16, "is 6 steps, .* train.global_batch_size: 3 or train.duration: 10 epochs"),
        ("1 epoch", 5, 16, "is 1 step, .* train.global_batch_size: 1 or train.duration: 20 epochs"),
        ("1 epoch", 5, 1, "is 5 steps, which teach a model little; write train.duration: 4 epochs, or"),
        ("1000 tokens", 40, 2, "is 5 steps, .* train.global_batch_size: 1 or a longer train.duration"),
        ("1 epoch", 320, 16, None),
        ("4 steps", 56, 16, None),
    ],
)
def test_few_steps_are_warned_of(duration: str, rows: int, batch: int, expected: str | None) -> None:
    recipe, plan = planned(duration, rows, batch)
    warning = few_steps(recipe, plan)
    assert (warning is None) == (expected is None)
    if expected is not None:
        assert re.search(expected, str(warning)), warning


@pytest.mark.parametrize(
    ("rows", "batch", "micro", "expected"), [(150, 16, 4, 4), (230, 24, 4, 8), (20, 8, 4, 4), (9, 4, 4, None)]
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
    assert smaller is not None and longer is not None
    assert plan_steps(Duration.parse(f"{longer[1]} epochs"), np.full(rows, 100), batch).total_steps >= FEW_STEPS
    steps = plan_steps(Duration.parse("1 epoch"), np.full(rows, 100), int(smaller[1])).total_steps
    assert steps >= min(FEW_STEPS, rows)
