"""What a launch says beside its figures."""

import pytest

from tuner.run.tasks.evaluate import SHOWN_CHARACTERS, _one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" two\nlines ", "two lines"),
        ("\n\n\t", r"'\n\n\t'"),
        ("\u2003 ", r"'\u2003 '"),
        ("", "''"),
        ("x" * 200, "x" * (SHOWN_CHARACTERS - 1) + "…"),
        ("\n" * 200, ("'" + r"\n" * 200)[: SHOWN_CHARACTERS - 1] + "…"),
    ],
)
def test_a_sample_in_one_line(text: str, shown: str) -> None:
    assert _one_line(text) == shown
