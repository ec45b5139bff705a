"""The campaign of stops in its smallest form, in real processes of a terminal of their own."""

import os
from pathlib import Path

import pytest

from tools import signal_campaign


@pytest.mark.multi
@pytest.mark.skipif("TUNER_TEST_EVERY_ROW" not in os.environ, reason="20 s of a processor: make campaign ONLY=layouts")
def test_a_closed_terminal_stops_the_run_with_a_checkpoint() -> None:
    [result] = signal_campaign.campaign(1, 0, ("hangup",))
    assert result["good"], result


@pytest.mark.skipif("TUNER_TEST_EVERY_ROW" not in os.environ, reason="40 s of a processor: make campaign ONLY=layouts")
def test_commands_that_load_libraries_end_with_130(tmp_path: Path) -> None:
    results = signal_campaign.moments(tmp_path, 2, 0, None, ("export-hf", "prepare-data"))
    assert [result["good"] for result in results] == [True, True], results
