"""Damaged and hostile artifacts: a sample of what the campaign tries."""

from __future__ import annotations

import json

import pytest

from tests.faults.artifacts import artifacts
from tests.faults.bench import Bench
from tests.faults.damage import damage_points, damage_trial
from tests.faults.hostile import attempt, hostile_points, hostile_trial

SAMPLE = (
    "pickle as checkpoint/index.json",
    "a shard of pickles, resealed",
    "index to '/etc/passwd'",
    "weights index to ../elsewhere.safetensors",
    "pickle as model/model.safetensors",
    "config with hidden_act",
    "template: globals",
    "a recipe with tags",
)


@pytest.mark.slow
def test_flipped_bits_and_cut_files_are_named_and_stepped_over(bench: Bench) -> None:
    for point in damage_points([bench], 120, seed=5):
        verdict = damage_trial(bench, point)
        assert verdict.problems == [], json.dumps(verdict.as_json())


@pytest.mark.parametrize("name", SAMPLE)
def test_hostile_artifacts_are_refused_by_name(bench: Bench, name: str) -> None:
    (point,) = [point for point in hostile_points(bench) if point.artifact.name == name]
    assert hostile_trial(bench, point).problems == []


def test_there_are_forty_of_them() -> None:
    names = [artifact.name for artifact in artifacts()]
    assert len(names) == len(set(names)) >= 40


def test_code_that_runs_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does what a file says: the attempt is not passed."""
    canary = bench.directory / "canary"
    monkeypatch.setattr("tuner.checkpoint.manifest.read_json", lambda path: canary.touch() or {})
    artifact = next(a for a in artifacts() if a.name == "pickle as checkpoint/manifest.json")
    _, wrong = attempt(bench, artifact)
    assert "its code ran" in wrong
    assert f"wrote {canary}" in wrong
