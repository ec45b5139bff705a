"""What is said of other tools' keys and files, followed, is what their documents mean."""

import os
from collections import Counter

import pytest

from tools.advice import files, keys
from tools.advice import planted_keys as planted
from tools.advice.proposals import proposed, resolved, written
from tuner.config.advice import of_unknown
from tuner.config.conversion import known_names


def test_every_key_of_another_tool_becomes_what_it_means_in_a_recipe() -> None:
    found = [keys.by_error(case) for case in keys.cases()]
    assert [(one.case.name, one.said, one.came) for one in found if one.verdict == "wrong"] == []
    assert keys.lost(found) == []
    assert Counter(one.verdict for one in found)["right"] >= 500


@pytest.mark.slow
def test_it_becomes_the_same_by_import() -> None:
    found = [keys.by_import(case) for case in keys.cases()[::4]]
    assert [(one.case.name, one.said, one.came) for one in found if one.verdict == "wrong"] == []
    assert keys.lost(found) == []


def test_wrong_answers_are_found() -> None:
    assert planted.missed() == []


def test_whole_files_become_what_they_mean_or_are_refused() -> None:
    found = [files.judged(row) for row in files.rows()]
    assert [one for one in found if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in found) >= 44


@pytest.mark.slow
def test_every_line_that_is_proposed_is_taken_by_a_recipe() -> None:
    """Whatever the value of a key is: the answer is no line, or one that resolves."""
    values = (True, False, 2, 100, 0.1, "auto", "none", "epoch", "a/b", ["q_proj"])
    every = 1 if "TUNER_TEST_EVERY_ROW" in os.environ else 3
    for i, name in enumerate(name for name in known_names() if "." not in name):
        for value in values[i % every :: every]:
            lines = proposed(said := of_unknown(name, value, {name: value}))
            assert ... not in lines.values(), (name, value, said)
            if lines:
                resolved(written({"model": {"name_or_path": "a/b"}, "data": {"train": "r", "eval": "h"}}, lines))
