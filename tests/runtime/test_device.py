"""The peak rate of the device, by which the share of it that a step takes is told."""

from __future__ import annotations

import pytest
import torch

from tuner.runtime import device
from tuner.runtime.device import measured_peak, side_of


def test_the_peak_is_measured_once_and_draws_no_number_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [side_of("cpu", threads) for threads in (1, 4, 5, 64)] == [1024, 1024, 2048, 4096]
    monkeypatch.setattr(device, "side_of", lambda kind, threads: 64)
    measured_peak.cache_clear()
    before = torch.get_rng_state()
    peaks = [measured_peak("cpu", "fp32") for _ in range(2)]
    assert peaks[0] == peaks[1] > 0
    assert torch.equal(torch.get_rng_state(), before)
    measured_peak.cache_clear()
