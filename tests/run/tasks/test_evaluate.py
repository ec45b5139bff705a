"""What a launch says beside its figures."""

import pytest

from tuner.runtime.console import one_line

WIDTH = 140


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" two\nlines ", "two lines"),
        ("\n\n\t", r"'\n\n\t'"),
        ("\u2003 ", r"'\u2003 '"),
        ("", "''"),
        ("x" * 200, "x" * (WIDTH - 1) + "…"),
        ("\n" * 200, ("'" + r"\n" * 200)[: WIDTH - 1] + "…"),
    ],
)
def test_a_sample_in_one_line(text: str, shown: str) -> None:
    assert one_line(text, WIDTH) == shown
