"""The packing benchmark on small sets: what it reports is consistent, and broken bounds are named."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tools import bench_pack as bench


@pytest.mark.parametrize("make", [bench.lognormal, bench.hard])
def test_the_sets_are_what_they_say(make: object) -> None:
    lengths = make(3000, 4096)  # type: ignore[operator]
    assert (len(lengths), lengths.min() >= 1, lengths.max() <= 4096) == (3000, True, True)
    long = (lengths > 2048).mean()
    assert long == pytest.approx(2 / 3, abs=1e-3) if make is bench.hard else long < 0.2


def test_a_peer_is_measured_on_the_same_lengths() -> None:
    seen: list[tuple[int, int]] = []

    def one_a_row(lengths: np.ndarray, capacity: int) -> tuple[int, float]:
        seen.append((int(lengths.sum()), capacity))
        return len(lengths), 9.0

    records = bench.packing(2000, 2, one_a_row)
    assert [(record["set"], record["capacity"]) for record in records] == [
        (name, capacity) for name in ("lognormal", "hard") for capacity in bench.CAPACITIES
    ]
    assert len(seen) == 2 * len(records)
    for record in records:
        assert record["sum_bound"] <= record["bound"] <= record["tuner"]["rows"] < record["trl"]["rows"] == 2000
        assert record["trl"]["seconds"] == 9.0
        assert record["tuner"]["efficiency"] == record["bound"] / record["tuner"]["rows"]


def test_dealing_waits_less_on_every_measured_set() -> None:
    records = bench.planner(5000, steps=5)
    assert {record["ranks"] for record in records} == {2, 4, 8}
    for record in records:
        assert 1 <= record["after"] < record["before"]
        assert 1 <= record["squares_after"] < record["squares_before"]


def test_rows_in_order_wait_for_the_costliest() -> None:
    plan = bench.in_order(4, 2, 2)
    assert [[share.tolist() for share in shares] for shares in plan] == [[[0], [1]], [[2], [3]]]
    assert bench.waiting(np.array([1, 3, 2, 2]), plan, 2) == (3 + 2) * 2 / 8


def test_broken_bounds_are_named() -> None:
    fine = {"set": "s", "capacity": 1, "tuner": {"efficiency": 1.0, "seconds": 0.1}}
    slow = {"set": "slow", "capacity": 2, "tuner": {"efficiency": 1.0, "seconds": 1.1}}
    loose = {"set": "loose", "capacity": 3, "tuner": {"efficiency": 0.9998, "seconds": 0.1}}
    report = {"packing": [fine, slow, loose], "memory": [{"capacity": 4, "peak_mib": 301}]}
    assert [line.split(":")[0] for line in bench.failures(report)] == [
        "packing slow at 2", "packing loose at 3", "memory at 4",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_command_prints_one_json_object() -> None:
    command = [sys.executable, bench.__file__, "packing", "memory", "--items=4000", "--rounds=1", "--no-peer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert sorted(report) == ["memory", "packing"]
    assert report["memory"][0]["documents"] == 4000
    assert report["memory"][0]["tokens"] > 0
    assert "lognormal" in done.stderr
