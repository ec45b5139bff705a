"""The campaign of kills of preference trainings in its smallest form: one trial, with two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import forked
from tools import reference_campaign


@pytest.mark.multi
def test_killed_and_run_again_is_the_unbroken_run(tmp_path: Path) -> None:
    (result,) = reference_campaign.campaign(tmp_path, 2, trials=1, seed=1, start=forked.Popen, pairs=30)
    assert result["resumed"]
    assert result["identical"]
