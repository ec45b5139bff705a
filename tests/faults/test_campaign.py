"""A sample of what tools/fault_campaign.py does in full: whole commands, struck anywhere, finished and compared.

And damaged and hostile artifacts. In one file, whose tests share the jobs that were done once unbroken.
"""

import json
import random
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.damage import damage_points, damage_trial
from tests.faults.evidence import label, phase
from tests.faults.hostile import all_artifacts, attempt, hostile_points, hostile_trial
from tests.faults.trials import (
    compound_points,
    error_points,
    error_trial,
    kill_points,
    kill_trial,
    power_points,
    power_trial,
)

SAMPLE = (
    "pickle as checkpoint/index.json",
    "a shard of pickles, resealed",
    "index to '/etc/passwd'",
    "weights index to ../elsewhere.safetensors",
    "pickle as model/model.safetensors",
    "config with hidden_act",
    "template: globals",
    "a recipe with tags",
    "a huge shape, generate",
    "adapter with layers_pattern that backtracks, generate",
    "train: cache/prepared, to what was there",
    "the cache as a whole is a link",
)


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


@pytest.mark.slow
def test_flipped_bits_and_cut_files_are_named_and_stepped_over(bench: Bench) -> None:
    for point in damage_points([bench], 120, seed=5):
        verdict = damage_trial(bench, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


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
