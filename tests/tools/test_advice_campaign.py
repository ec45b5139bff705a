"""The lines that are proposed for rows of other layouts are followed, and wrong ones among them are found."""

import pytest

from tools.advice.rows import PLANTED, Place, all_of, layouts, lost, planted
from tools.advice_campaign import main

LAYOUTS = {layout["id"]: layout for layout in layouts()}
FEW = (
    "kto-system-prompt-completion", "pref-context-messages", "pref-conversations-turns-from-value",
    "pref-hh-full-texts", "pref-instruction-input-text", "pref-none-message", "pref-openai-preference",
    "pref-system-question-alike", "sft-dolly", "sft-oasst-tree-rows", "sft-openorca", "sft-xlam",
)  # fmt: skip
"""One of each kind."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("advice"))


def test_what_is_proposed_for_rows_trains_what_is_meant(place: Place) -> None:
    found = {name: all_of(place, LAYOUTS[name]) for name in FEW}
    wrong = [one for cells in found.values() for made in cells.values() for one in made if not one.right]
    assert wrong == [] and lost(found) == []
    assert (
        sum(one.how in {"advice", "init"} for cells in found.values() for made in cells.values() for one in made) > 40
    )


def test_wrong_proposals_are_found(place: Place) -> None:
    assert len(PLANTED) >= 10 and planted(place, list(LAYOUTS.values())) == []


def test_a_part_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "rows" in capsys.readouterr().err


def test_every_layout_says_where_it_comes_from() -> None:
    assert len(LAYOUTS) >= 75 and all(layout["source"] for layout in LAYOUTS.values())
