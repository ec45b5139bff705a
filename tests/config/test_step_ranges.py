"""Steps and ranges of steps, as a recipe writes them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.load import load_recipe
from tuner.config.numbers import MOST_STEPS, StepRange, Steps, is_among
from tuner.errors import RecipeError

ENDS = st.integers(1, MOST_STEPS)
RANGES = st.tuples(ENDS, ENDS).map(lambda ends: StepRange(min(ends), max(ends)))


@given(RANGES)
def test_what_is_written_reads_back(steps: StepRange) -> None:
    assert Steps().read(Steps().plain(steps)) == steps
    assert Steps().read(str(steps)) == steps


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9))), st.integers(1, 70))
def test_both_ends_belong_to_a_range(ends: list[tuple[int, int]], step: int) -> None:
    ranges = [StepRange(first, first + more) for first, more in ends]
    assert is_among(step, ranges) == (step in {n for first, more in ends for n in range(first, first + more + 1)})


@pytest.mark.parametrize(("value", "said"), cases(__file__, "anything_else_is_refused"))
def test_anything_else_is_refused(value: Any, said: str) -> None:
    recipe = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "train": {"steps_to_skip": [value]}}
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert said in str(caught.value) and "train.steps_to_skip" in str(caught.value)
