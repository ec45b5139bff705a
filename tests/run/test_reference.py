"""The reference of a run: computed once, kept, found again, and exactly the policy before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import paired
from tests.fixtures.trainings import launch, lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pairs")
    paired.prepare(directory)
    return directory


def test_a_run_begins_as_its_reference(made: Path) -> None:
    result = launch(made, train__duration="3 steps")
    first = lines(result.run_dir)[0]
    print(first)
    assert first["margin"] == first["reward_chosen"] == first["reward_rejected"] == 0.0
