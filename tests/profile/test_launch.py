"""A profile over several processes: what each holds, and one report for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.profile.test_measure import recipe  # noqa: F401 - a fixture
from tuner.config.load import load_recipe
from tuner.config.overrides import Override
from tuner.profile.launch import ProfileOptions, profile
from tuner.profile.measure import ProfileReport, of_all


def profiled(path: Path, **flags: str) -> ProfileReport:
    overrides = [Override(key.replace("__", "."), text) for key, text in flags.items()]
    total_steps, report = profile(load_recipe(path, overrides), ProfileOptions(1), "error")
    assert report is not None
    assert report.total_steps == total_steps
    return report


@pytest.mark.multi
def test_two_processes_hold_half_of_what_one_does(recipe: Path) -> None:  # noqa: F811
    one, two = profiled(recipe), profiled(recipe, parallel__processes="2")
    assert (one.processes, two.processes) == (1, 2)
    assert "in each of 2 processes" in two.text()
    assert two.tokens_per_step == one.tokens_per_step
    assert two.free_bytes < 0.6 * one.free_bytes
    assert two.memory["optimizer"] == pytest.approx(one.memory["optimizer"] / 2, rel=0.05)
    # Its shards, and at the peak no more than the root's weights and one block's, gathered.
    assert one.memory["weights"] / 2 < two.memory["weights"] < 1.2 * one.memory["weights"]
    assert not (recipe.parent / "runs").exists()


def test_one_report_for_all_is_of_the_process_where_memory_is_shortest(recipe: Path) -> None:  # noqa: F811
    first = profiled(recipe)
    tight = replace(first, peak_bytes=90, free_bytes=100, memory={"weights": 90}, step_s=7.0)
    large = replace(first, peak_bytes=200, free_bytes=1000)
    found = of_all([replace(first, peak_bytes=1), large, tight])
    assert (found.peak_bytes, found.free_bytes, found.memory, found.step_s) == (90, 100, {"weights": 90}, first.step_s)
