"""Advice that proposes a line, a flag or a command is provoked and followed; all has a case but what is listed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tools.advice.hint_cases import Case, cases
from tools.advice.hint_place import Place, judged
from tools.advice.hint_sites import Site, sites
from tools.advice.hint_starts import STARTS
from tools.advice.hints import WHAT_TO_DO, needless, without_case
from tools.tables import read_table

CASES = cases()
NOT_FOLLOWED: dict[str, list[str]] = read_table(Path(__file__).with_name("hints_not_followed.yaml"))
"""Sites without a case, by the beginnings of their names, and why. It only gets shorter."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hints"))


@pytest.mark.slow("cli/data.py:show")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.site, marks=[pytest.mark.slow] if case.is_dear else []) for case in CASES]
)
def test_what_is_proposed_leads_on(case: Case, place: Place) -> None:
    assert judged(case, place, STARTS) == ""


def test_all_that_is_proposed_is_followed() -> None:
    allowed = [entry for entries in NOT_FOLLOWED.values() for entry in entries]
    assert without_case(sites(), CASES, allowed) == [], WHAT_TO_DO


def test_a_new_proposal_without_a_case_is_found() -> None:
    new = Site("setup/other.py", "check", "write train.compile: false")
    assert without_case([*sites(), new], CASES, [site.name for site in sites()]) == [new.name]


def test_each_case_is_about_one_text() -> None:
    assert {case.site: len(case.sites) for case in CASES if len(case.sites) != 1} == {}


def test_nothing_is_listed_that_is_followed_or_gone() -> None:
    assert needless(sites(), CASES, NOT_FOLLOWED) == []
    wrong = (CASES[0].site, "setup/other.py:check")
    assert needless(sites(), CASES, {"": wrong}) == [*wrong]


WAY = "train.gradient_checkpointing: full"
OFFLOADED = next(case for case in CASES if case.site.startswith("config/rules.json:offload_needs"))
MEANT_NONE = replace(OFFLOADED, meant=({"train.gradient_checkpointing": "none"},))
PLANTED: tuple[tuple[str, Case, Callable[[str], str], str], ...] = (
    ("another key", OFFLOADED, lambda text: text.replace(WAY, "train.compile: true"), "it proposes"),
    ("a key that is not there", OFFLOADED, lambda text: text.replace(WAY, "train.recompute: full"), "it proposes []"),
    ("another value", OFFLOADED, lambda text: text.replace("full", "selective"), "it proposes"),
    ("a value that is not taken", OFFLOADED, lambda text: text.replace("full", "all"), "it proposes []"),
    ("the same error again", MEANT_NONE, lambda text: text.replace("full", "none"), "ends with 2"),
    ("one way too few", OFFLOADED, lambda text: f"{text}, or train.offload_activations: false", "it proposes"),
    ("it is never said", replace(OFFLOADED, recipe={}), str, "it is not said"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "reworded", "found"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED])
def test_a_wrong_proposal_is_found(case: Case, reworded: Callable[[str], str], found: str, place: Place) -> None:
    assert judged(OFFLOADED, place, STARTS) == ""
    assert found in judged(case, place, STARTS, reworded)
