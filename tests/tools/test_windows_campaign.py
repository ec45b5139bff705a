"""The campaign of windows: what it kills is there, and it sees what it is to see."""

import importlib
from functools import reduce

import pytest

from tools.windows_campaign import PHASES, ROWS, once


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_killed_is_there(phase: str) -> None:
    place = PHASES[phase]
    assert callable(reduce(getattr, place.name.split("."), importlib.import_module(place.module)))


def test_windows_fill_their_batches_and_one_is_empty() -> None:
    assert [name for name, count in ROWS.items() if count == 0] == ["w3"]
    assert all(count % 4 == 0 for count in ROWS.values())
    assert (ROWS["w1"] + ROWS["w2"]) // 4 == 5  # the checkpoint at which the late one is put into its place


def test_documents_that_are_trained_twice_or_not_are_seen() -> None:
    assert once({0: [[1], [2]], 1: [[3]]}, 3)
    assert not once({0: [[1], [2]], 1: [[1]]}, 2)
    assert not once({0: [[1], [2]]}, 3)
