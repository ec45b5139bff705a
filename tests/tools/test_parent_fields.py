"""Every field of the frameworks that tuner descends from is answered, and what it says to write can be written."""

import re

import pytest

from tools.parent_fields import REASONS, TITLES, Answer, answers, page, refused

COUNTS = {"arctictraining": 269, "xtuner_v1": 198, "olmo_core": 345, "recis": 28}
"""Fields of each at the commits that the tables were made from; newer ones may be added."""


@pytest.mark.parametrize("name", TITLES)
def test_every_field_is_answered(name: str) -> None:
    found = answers(name)
    fields = [answer.field for answer in found]
    assert len(set(fields)) == len(fields) >= COUNTS[name] - 20, "a class that stands twice is answered once"
    assert all(re.fullmatch(r"\w+\.\w+", field) for field in fields)
    assert not [one.field for one in found if len(one.says.split()) > 25 or "unknown" in one.says.lower()]


@pytest.mark.parametrize("name", TITLES)
def test_what_is_to_be_written_is_accepted(name: str) -> None:
    assert {answer.field: problem for answer in answers(name) if (problem := refused(answer))} == {}


def test_a_wrong_line_is_found() -> None:
    assert "train.steps" in refused(Answer("A.b", "of no use", write={"train.steps": 5}))
    assert refused(Answer("A.b", "it is", write={"train.duration": "5 steps"})) == ""


@pytest.mark.parametrize("name", TITLES)
def test_the_page_has_them_all(name: str) -> None:
    text = page(name)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(answers(name)) and all(line.count(" | ") == 2 for line in rows)
    assert all(f"({words})" in text for kind, words in REASONS.items() if any(a.reason == kind for a in answers(name)))
