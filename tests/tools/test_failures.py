
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.contracts.syntax import ROOT
from tools.failures import APART, GPU_HOURS, GPUS, RESTART, STALL, WRITE, Job, lines, main, simulated, table

JOB = Job(3600 * GPU_HOURS / 4096, STALL, WRITE, RESTART)


def test_the_page_has_the_figures() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert [line for line in lines(table(JOB, GPUS, GPU_HOURS, 0, 0)) if line not in page] == []


@pytest.mark.parametrize("gpus", [64, 512, 4096, pytest.param(8, marks=pytest.mark.slow)])
def test_formula_and_simulation_agree(gpus: int) -> None:
    (record,) = table(JOB, [gpus], GPU_HOURS, 3000, seed=1)
    assert abs(record["simulated"] / record["lost"] - 1) < APART


@pytest.mark.parametrize("change", [{"restart": 1980.0}, {"write": 200.0}, {"stall": 60.0, "write": 0.0}], ids=str)
def test_they_agree_where_restart_write_or_stall_is_what_is_lost(change: dict[str, Any]) -> None:
    job = replace(JOB, **change)
    for interval in (job.interval, 4 * job.interval):
        assert simulated(job, interval, 4000, seed=2) == pytest.approx(job.lost(interval), rel=APART)


def test_no_interval_loses_less() -> None:
    others = JOB.interval * np.geomspace(0.5, 2, 41)
    least = min(JOB.lost(interval) for interval in others)
    assert JOB.lost(JOB.interval) < least * 1.001
    assert JOB.interval == pytest.approx(math.sqrt(2 * STALL * JOB.between))
    assert replace(JOB, write=1000.0).interval == 1000.0


def test_without_failures_only_saves_cost() -> None:
    never = replace(JOB, between=1e12)
    assert never.lost(99.3) == pytest.approx(STALL / (99.3 + STALL), rel=1e-3)


def test_it_is_said_where_both_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["failures", "--gpus", "2048", "--failures", "1000"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["gpus"] == 2048
    monkeypatch.setattr("tools.failures.simulated", lambda *_: 0.5)
    assert main() == 1
