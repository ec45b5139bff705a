"""The parts of bench_train that could make a figure wrong: rows, arithmetic, medians, goals; one run."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import bench_train
from tools.bench_train_cases import CASES, NINE_MILLION, SMALLEST, flops_per_step, write_model, write_rows

ROWS = [{"input_ids": [3] * 64, "seq_lengths": [40, 24]}, {"input_ids": [3] * 64, "seq_lengths": [64]}]


def side(step_s: list[float], loss: list[float]) -> dict[str, Any]:
    return {"step_s": step_s, "loop_s": sum(step_s), "loss": loss, "peak_gib": 1.0, "versions": {}}


def test_documents_fill_the_rows_exactly(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 64, 256, 5, seed=1)
    lengths = [len(json.loads(line)["input_ids"]) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sum(lengths) == 5 * 256
    ends = {sum(lengths[: i + 1]) for i in range(len(lengths))}
    assert {256 * i for i in range(1, 6)} <= ends
    assert len(lengths) >= 10


def test_arithmetic_of_a_step(tmp_path: Path) -> None:
    write_model(SMALLEST, tmp_path)
    # A layer: queries and the way back of 4 heads of 8, keys and values of 2, three products of 32 by 64.
    layer, head = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64, 64 * 32
    attention = 6 * 2 * 4 * 8 * (40**2 + 24**2 + 64**2)
    assert flops_per_step(tmp_path, False, ROWS) == 6 * (2 * layer + head) * 128 + attention
    adapter = 2 * 16 * (2 * 64 + 2 * 48 + 3 * 96)
    assert flops_per_step(tmp_path, True, ROWS) == (4 * (2 * layer + head) + 6 * adapter) * 128 + attention


def test_the_nine_million_shape_has_nine_million() -> None:
    shape = NINE_MILLION
    layer = 256 * 32 * (8 + 8 + 4 + 4) + 3 * 256 * 768
    assert 8.3e6 < shape["num_hidden_layers"] * layer + 8192 * 256 < 9.1e6


def test_medians_leave_the_warm_up_out() -> None:
    assert bench_train.median_step(side([9.0, 9.0, 9.0, 1.0, 3.0, 2.0], [])) == 2.0
    assert bench_train.median_step(side([9.0, 1.0], [])) == 1.0
    found = bench_train.figures([side([5.0] * 3 + [s], []) for s in (1.0, 2.0, 4.0)], flops=10.0, peak=20.0)
    assert (found["step_s"], found["spread"], found["of_peak"]) == (2.0, [1.0, 4.0], 0.25)
    assert found["whole_s"] == 4.25


def test_a_goal_that_is_missed_and_a_curve_that_differs() -> None:
    case = CASES["smollm2-full"]
    sides = {"tuner": {"step_s": 1.0, "whole_s": 2.0}, "trl, defaults": {"step_s": 4.0, "whole_s": 4.0}}
    sides["trl, best"] = {"step_s": 2.0, "whole_s": 2.0}
    report = {"sides": sides, "loss": {"tuner": [3.0, 2.0], "trl, defaults": [3.0, 2.001], "trl, best": [3.0, 2.5]}}
    found = bench_train.verdict(case, report)
    assert found["against"]["trl, defaults"] == {"ratio_step": 4.0, "ratio_whole": 2.0, "loss_difference": 0.001}
    assert [line.partition(":")[0] for line in found["missed"]] == ["trl, best", "trl, best"]


def test_windows_are_means_of_fifty_steps() -> None:
    assert bench_train.windows([1.0] * 50 + [3.0] * 50) == [1.0, 3.0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_the_command_on_the_smallest_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer stands in here with our own losses: it is not installed everywhere."""
    case = replace(CASES["smallest"], steps=2)
    write_model(SMALLEST, tmp_path / "model")
    bench = bench_train.Bench(case, tmp_path / "model", tmp_path, "cpu", [])
    ours: list[dict[str, Any]] = []
    real = bench_train.Bench.ours
    monkeypatch.setattr(bench_train.Bench, "ours", lambda self: ours.append(real(self)) or ours[-1])
    monkeypatch.setattr(bench_train.Bench, "peak", lambda self: 1e9)
    monkeypatch.setattr(
        bench_train.Bench, "peer", lambda self, settings: side([100.0, 100.0], ours[-1]["loss"]) | {"of": settings}
    )
    report = bench_train.measure(bench, rounds=1)
    assert report["missed"] == []
    assert len(ours[0]["loss"]) == 2 and all(math.isfinite(loss) for loss in ours[0]["loss"])
    assert 0 < statistics.median(ours[0]["step_s"]) < ours[0]["loop_s"]
    assert report["tokens_per_step"] == pytest.approx(128, rel=0.2)
    assert report["against"]["trl, best"]["ratio_step"] > 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(len(row["input_ids"]) == sum(row["seq_lengths"]) <= 64 for row in rows)
