"""A sample of what tools/fault_campaign.py does in full: whole commands, struck anywhere, finished and compared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.evidence import label, phase
from tests.faults.trials import (
    compound_points,
    error_points,
    error_trial,
    kill_points,
    kill_trial,
    power_points,
    power_trial,
)


def test_killed_in_every_phase(bench: Bench) -> None:
    """Points at random, so many that there is one of each phase and one of each job."""
    rng = random.Random(0)
    points = list(kill_points([bench]))
    rng.shuffle(points)
    chosen = {(point.job, phase(bench.traces[point.job].calls[point.faults[0].at - 1])): point for point in points}
    assert {job for job, _ in chosen} == {"prepare", "train", "resume", "export"}
    assert {name for _, name in chosen} == {"prepare", "save", "prune", "export", "records", "run"}
    jobs, phases = set[str](), set[str]()
    for (job, name), point in chosen.items():
        if job in jobs and name in phases:
            continue
        jobs.add(job)
        phases.add(name)
        verdict = kill_trial(bench, point)
        assert verdict.struck == 1
        assert verdict.problems == [], json.dumps(verdict.as_json())


@pytest.mark.slow
def test_killed_again_in_the_recovery(bench: Bench) -> None:
    for point in compound_points([bench], 4, seed=3):
        verdict = kill_trial(bench, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


@pytest.mark.slow
def test_killed_while_a_save_runs_beside_the_steps(bench: Bench, tmp_path: Path) -> None:
    beside = Bench(tmp_path, "lora", beside=True)
    beside.set_up(whole=False)
    assert beside.sound.sha256 == bench.sound.sha256
    for point in random.Random(2).sample(list(kill_points([beside], ["train"])), 3):
        verdict = kill_trial(beside, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


@pytest.mark.slow
def test_power_is_lost(bench: Bench) -> None:
    for point in power_points([bench], 8, seed=1):
        verdict = power_trial(bench, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


@pytest.mark.slow
def test_calls_fail(bench: Bench) -> None:
    points = list(error_points([bench]))
    for point in random.Random(4).sample(points, 8):
        verdict = error_trial(bench, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


def test_there_are_hundreds_of_distinct_points(bench: Bench) -> None:
    names = {(job, phase(call), label(call, bench.root)) for job, trace in bench.traces.items() for call in trace.calls}
    assert len(names) > 200
