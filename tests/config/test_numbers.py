"""Exact human numbers, durations, and steps and ranges of them as a recipe writes them."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config import numbers
from tuner.config.load import load_recipe
from tuner.config.numbers import Duration, StepRange, Steps, is_among, parse_bytes, parse_number, write_number
from tuner.errors import RecipeError

SUFFIXES = numbers.DECIMAL_SUFFIXES | numbers.BINARY_SUFFIXES


@pytest.mark.parametrize(("text", "value"), cases(__file__, "numbers_are_exact"))
def test_numbers_are_exact(text: str | float, value: str | int) -> None:
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize("text", cases(__file__, "what_is_no_number"))
def test_what_is_no_number_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_number(text)


@given(st.integers(), st.sampled_from(sorted(SUFFIXES)))
def test_a_suffix_multiplies(count: int, suffix: str) -> None:
    count %= 10**12
    assert parse_number(f"{count}{suffix}") == count * SUFFIXES[suffix]


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_written_numbers_read_back(number: object) -> None:
    value = Fraction(str(number))
    assert parse_number(write_number(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300, max_value=1e300))
def test_floats_read_as_they_print(number: float) -> None:
    assert float(parse_number(repr(number))) == number


@pytest.mark.parametrize(("text", "size"), cases(__file__, "sizes"))
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "-5GB", "1.5", "0.5B", "GB", "inf"])
def test_sizes_are_whole_and_positive(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "count", "unit"), cases(__file__, "durations"))
def test_durations(text: str, count: str | int, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.count, duration.unit) == (Fraction(count), unit)


@given(st.integers(1, 10**12), st.sampled_from(sorted(set(numbers.WORDS.values()))))
def test_durations_read_back(count: int, unit: str) -> None:
    text = f"{count % 100 + 1}%" if unit == "%" else f"{count} {unit}"
    duration = Duration.parse(text)
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    "text", ["0 steps", "-1 steps", "1.5 steps", "3 parsecs", "steps", "", "101%", "nan steps", "1 2 steps", "5 STEPS"]
)
def test_wrong_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Duration.parse(text)


def test_a_bare_number_is_asked_for_its_unit() -> None:
    with pytest.raises(ValueError, match=r"^200 what\? write 200 steps, 200 epochs or 200 tokens$"):
        Duration.parse(200, ("steps", "epochs", "tokens"))
    with pytest.raises(ValueError, match=r"^4K what\?"):
        Duration.parse("4K", ("steps",))


def test_seconds_and_shares() -> None:
    assert Duration.parse("1.5 h").seconds == 5400
    assert Duration.parse("10%").share == Fraction(1, 10)
    with pytest.raises(ValueError, match="not a time"):
        _ = Duration.parse("3 steps").seconds
    with pytest.raises(ValueError, match="not a percentage"):
        _ = Duration.parse("3 steps").share


ENDS = st.integers(1, numbers.MOST_STEPS)
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
