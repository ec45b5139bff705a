"""The campaign of kills of preference trainings in its smallest form: one kill, with two processes."""

from pathlib import Path

import pytest

from tests.fixtures import forked
from tools import reference_campaign


@pytest.mark.slow
@pytest.mark.multi
def test_killed_and_run_again_is_the_unbroken_run(tmp_path: Path) -> None:
    results = reference_campaign.campaign(tmp_path, 2, kills=1, seed=1, start=forked.Popen, pairs=30)
    assert results[-1]["killed"]
    assert all(result["resumed"] and result["identical"] for result in results)
