"""What is said of other tools' keys and files, followed, is what their documents mean."""

from collections import Counter

from tools.advice import files, keys
from tools.advice import planted_keys as planted


def test_every_key_of_another_tool_becomes_what_it_means_in_a_recipe() -> None:
    found = [keys.by_error(case) for case in keys.cases()]
    assert [(one.case.name, one.said, one.came) for one in found if one.verdict == "wrong"] == []
    assert keys.lost(found) == []
    assert Counter(one.verdict for one in found)["right"] >= 500


def test_wrong_answers_are_found() -> None:
    assert planted.missed() == []


def test_whole_files_become_what_they_mean_or_are_refused() -> None:
    found = [files.judged(row) for row in files.rows()]
    assert [one for one in found if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in found) >= 44
