"""The campaign of kills and resumes in its smallest form: one trial with one process, and one with two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import forked
from tools import resume_campaign


@pytest.mark.multi
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_resumed_is_the_unbroken_run(world_size: int, tmp_path: Path) -> None:
    (result,) = resume_campaign.campaign(tmp_path, world_size, trials=1, seed=1, start=forked.Popen)
    assert result["killed"]
    assert result["resumed"]
    assert result["identical"]
