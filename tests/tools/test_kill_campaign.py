"""The campaign of kills at points of its own in its smallest form: one trial of each point, in one process."""

from pathlib import Path

import pytest

from tools import kill_campaign


@pytest.mark.slow
def test_each_point_goes_on_to_the_unbroken_run(tmp_path: Path) -> None:
    points = [point for point in kill_campaign.POINTS if point != "fewer"]
    results = list(kill_campaign.campaign(tmp_path, points, [1], count=1, seed=0))
    assert {result["point"] for result in results} == {*points}
    assert not list(kill_campaign.campaign(tmp_path / "again", points, [1], count=1, seed=0, known=results))
    assert [result for result in results if not result["good"]] == []
