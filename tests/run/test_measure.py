"""A profile over several processes: what each holds, and one report for all."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.trainings import overrides
from tests.profile.test_measure import recipe  # noqa: F401 - a fixture
from tuner.config.load import load_recipe
from tuner.profile.measure import Measurement, MeasureOptions, of_all
from tuner.run.measure import measure_recipe


def measured(path: Path, **flags: str) -> Measurement:
    measured = measure_recipe(load_recipe(path, overrides(flags)), MeasureOptions(1), "error")
    assert measured.found is not None and measured.found.total_steps == measured.total_steps
    return measured.found


@pytest.mark.multi
@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
def test_two_processes_hold_half_of_what_one_does(recipe: Path) -> None:  # noqa: F811
    one, two = measured(recipe), measured(recipe, parallel__processes="2")
    assert (one.processes, two.processes) == (1, 2)
    assert "in each of 2 processes" in two.text() and "communication" in two.time_text()
    assert two.communication_s > 0 == one.communication_s
    assert two.tokens_per_step == one.tokens_per_step
    assert 0.3 * one.flops < two.flops < 0.7 * one.flops
    assert two.free_bytes < 0.6 * one.free_bytes
    assert two.memory.parts["optimizer"] == pytest.approx(one.memory.parts["optimizer"] / 2, rel=0.05)
    assert two.memory.parts["parameters"] == pytest.approx(one.memory.parts["parameters"] / 2, rel=0.05)
    # At the peak no more than the root's weights and one block's, gathered, and the buffers they came in.
    assert 0 < two.memory.parts["gathered"] < 2 * one.memory.parts["parameters"]
    assert not (recipe.parent / "runs").exists()


def test_one_report_for_all_is_of_the_process_where_memory_is_shortest(recipe: Path) -> None:  # noqa: F811
    first = measured(recipe)
    tight = replace(first, memory=replace(first.memory, peak_bytes=90), free_bytes=100, device="other")
    large = replace(first, memory=replace(first.memory, peak_bytes=200), free_bytes=1000)
    found = of_all([replace(first, memory=replace(first.memory, peak_bytes=1)), large, tight])
    assert (found.memory.peak_bytes, found.free_bytes, found.device) == (90, 100, first.device)
