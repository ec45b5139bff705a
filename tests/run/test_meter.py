"""A step's figures of the clock: rates, the wait for data, and how much of the device the model's arithmetic takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tuner.data.batches import Batch, StepBatches
from tuner.model.flops import Flops
from tuner.run import meter
from tuner.run.meter import Meter
from tuner.runtime import peak
from tuner.runtime.console import Console
from tuner.runtime.peak import measured_peak, side_of
from tuner.train.figures import CLOCKED
from tuner.train.mfu import MfuMeter

FLOPS = Flops(products=100.0, output=1000.0, attention={None: 1.0})


def batch(*lengths: int, trained: int) -> Batch:
    ids = np.zeros(sum(lengths), dtype=np.int64)
    return Batch(ids, ids, ids, lengths, np.arange(trained), np.arange(len(lengths)))


def test_figures_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 14.0])
    monkeypatch.setattr(meter.time, "monotonic", lambda: next(times))
    measured = Meter(1.0, torch.device("cpu"), 5, MfuMeter(FLOPS, peak=1e4))
    measured.begin()
    batches = StepBatches(np.arange(4), 6, 40, [batch(3, 2, trained=2), batch(4, trained=1)])
    line = measured.step_line({"kind": "train", "step": 1}, batches, 1.0)
    assert list(line) == ["kind", "step", *CLOCKED]
    assert (line["step_s"], line["data_s"], line["data_wait"]) == (4.0, 1.0, 0.25)
    assert (line["tok_per_s"], line["trained_per_s"]) == (10.0, 1.5)
    operations = 100 * 9 + 1000 * 3 + (3**2 + 2**2 + 4**2)
    assert line["mfu"] == round(operations / 4 / 1e4, 4) == 0.0982


def test_a_share_that_is_not_known_is_left_out() -> None:
    unknown = Meter(1.0, torch.device("cpu"), 5, MfuMeter(replace(FLOPS, complete=False), peak=1e4))
    unknown.begin()
    facts = {"kind": "train", "step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3}
    line = unknown.step_line(facts, StepBatches(np.arange(4), 6, 40, [batch(4, trained=1)]), 0.0)
    assert list(line) == [*facts, *(key for key in CLOCKED if key != "mfu")]
    shown: list[str] = []
    console = Console(main=False)
    console.line = shown.append  # type: ignore[method-assign, assignment]
    unknown.show(console)
    header, values = (text.split() for text in shown)
    assert values[header.index("mfu") - 1] == "-"  # there is no evaluation in the line of a step


def test_the_peak_is_measured_once_and_draws_no_number_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [side_of("cpu", threads) for threads in (1, 4, 5, 64)] == [1024, 1024, 2048, 4096]
    monkeypatch.setattr(peak, "side_of", lambda kind, threads: 64)
    measured_peak.cache_clear()
    before = torch.get_rng_state()
    peaks = [measured_peak("cpu", "fp32") for _ in range(2)]
    assert peaks[0] == peaks[1] > 0
    assert torch.equal(torch.get_rng_state(), before)
    measured_peak.cache_clear()
