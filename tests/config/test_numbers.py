"""Exact human numbers and durations."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.numbers import (
    BINARY_SUFFIXES,
    DECIMAL_SUFFIXES,
    WORDS,
    Duration,
    parse_bytes,
    parse_number,
    write_number,
)


@pytest.mark.parametrize(("text", "value"), cases(__file__, "numbers_are_exact"))
def test_numbers_are_exact(text: str | float, value: str | int) -> None:
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize("text", cases(__file__, "what_is_no_number"))
def test_what_is_no_number_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_number(text)


@given(st.integers(), st.sampled_from(sorted(DECIMAL_SUFFIXES | BINARY_SUFFIXES)))
def test_a_suffix_multiplies(count: int, suffix: str) -> None:
    count %= 10**12
    assert parse_number(f"{count}{suffix}") == count * (DECIMAL_SUFFIXES | BINARY_SUFFIXES)[suffix]


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


@given(st.integers(1, 10**12), st.sampled_from(sorted(set(WORDS.values()))))
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
