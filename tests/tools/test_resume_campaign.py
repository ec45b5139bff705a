"""The campaign of kills and resumes in its smallest form: one trial, with two processes."""

from pathlib import Path

import pytest

from tests.fixtures import forked
from tools import resume_campaign


@pytest.mark.slow
@pytest.mark.multi
def test_killed_and_resumed_is_the_unbroken_run(tmp_path: Path) -> None:
    (result,) = resume_campaign.campaign(tmp_path, 2, trials=1, seed=1, start=forked.Popen)
    assert result["killed"]
    assert result["resumed"]
    assert result["identical"]
