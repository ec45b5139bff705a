"""The peak rate of the device, by which the share of it that a step takes is told."""

import pytest
import torch

from tests.fixtures.tables import cases
from tuner.runtime import device
from tuner.runtime.device import measured_peak, side_of


def test_the_peak_is_measured_once_and_draws_no_number_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [side_of("cpu", threads) for threads in (1, 4, 5, 64)] == [1024, 1024, 2048, 4096]
    monkeypatch.setattr(device, "side_of", lambda kind, threads: 64)
    measured_peak.cache_clear()
    before = torch.get_rng_state()
    peaks = [measured_peak("cpu", "fp32", 0) for _ in range(2)]
    assert peaks[0] == peaks[1] > 0
    assert torch.equal(torch.get_rng_state(), before)
    measured_peak.cache_clear()


@pytest.mark.parametrize(("flags", "bound", "fast"), cases(__file__, "bf16_is_fast"))
def test_bf16_is_fast_where_the_processor_has_it_and_onednn_may_use_it(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], bound: dict[str, str], fast: bool
) -> None:
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in bound.items():
        monkeypatch.setenv(name, value)
    assert device.device_facts("cpu").bf16_fast is fast


@pytest.mark.parametrize(("flags", "precision", "side"), cases(__file__, "the_product_is_small"))
def test_the_product_is_small_where_the_processor_lacks_the_type(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], precision: str, side: int | None
) -> None:
    """Without a side here it is that of slow products: one of 1024 would take such a processor seconds."""
    seen: list[int] = []
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.append(len(left)))
    measured_peak.cache_clear()
    measured_peak("cpu", precision, 0)
    measured_peak.cache_clear()
    assert set(seen) == {side or device.SLOW_SIDE}
