"""A sample of what tools/fault_campaign.py does in full: whole commands, struck anywhere, finished and compared.

And damaged and hostile artifacts. In one file, whose tests share the jobs that were done once unbroken.
"""

import json
import random
from typing import Any

import pytest

from tests.faults.bench import Bench
from tests.faults.evidence import label, phase
from tests.faults.hostile import all_artifacts, attempt, hostile_points, hostile_trial
from tests.faults.trials import kill_points, kill_trial
from tests.fixtures.tables import cases

SAMPLE: Any = cases(__file__, "sample")


def test_killed_in_every_phase(bench: Bench) -> None:
    """Points at random: one of each phase and one of each job, as few as have them all, in jobs that do little."""
    rng = random.Random(0)
    points = list(kill_points([bench]))
    rng.shuffle(points)
    chosen = {(point.job, phase(bench.traces[point.job].calls[point.faults[0].at - 1])): point for point in points}
    assert {job for job, _ in chosen} == {"prepare", "train", "resume", "export"}
    assert {name for _, name in chosen} == {"prepare", "save", "prune", "export", "records", "run"}
    calls = {job: len(trace.calls) for job, trace in bench.traces.items()}
    jobs, phases = {job for job, _ in chosen}, {name for _, name in chosen}
    while jobs or phases:
        job, name = max(chosen, key=lambda pair: ((pair[0] in jobs) + (pair[1] in phases), -calls[pair[0]]))
        jobs.discard(job)
        phases.discard(name)
        verdict = kill_trial(bench, chosen[job, name])
        assert verdict.struck == 1
        assert verdict.problems == [], json.dumps(verdict.as_json())


def test_there_are_hundreds_of_distinct_points(bench: Bench) -> None:
    names = {(job, phase(call), label(call, bench.root)) for job, trace in bench.traces.items() for call in trace.calls}
    assert len(names) > 200


@pytest.mark.slow(
    "adapter with layers_pattern that backtracks, generate",
    "pickle as model/model.safetensors",
    "index to '/etc/passwd'",
    "config with hidden_act",
    "a huge shape, generate",
    "train: cache/prepared, to what was there",
)
@pytest.mark.parametrize("name", SAMPLE)
def test_hostile_artifacts_are_refused_by_name(bench: Bench, name: str) -> None:
    (point,) = [point for point in hostile_points(bench) if point.artifact.name == name]
    assert hostile_trial(bench, point).problems == []


def test_there_are_hundreds_of_them() -> None:
    names = [artifact.name for artifact in all_artifacts()]
    assert len(names) == len(set(names)) >= 400


def test_code_that_runs_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does what a file says: the attempt is not passed."""
    canary = bench.directory / "canary"
    monkeypatch.setattr("tuner.checkpoint.manifest.read_json", lambda path: canary.touch() or {})
    artifact = next(a for a in all_artifacts() if a.name == "pickle as checkpoint/manifest.json")
    _, wrong = attempt(bench, artifact)
    assert "its code ran" in wrong
    assert f"wrote {canary}" in wrong
