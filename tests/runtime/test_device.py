"""The peak rate of the device, by which the share of it that a step takes is told."""

import pytest
import torch

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


@pytest.mark.parametrize(
    ("flags", "bound", "fast"),
    [
        ({"avx512_bf16"}, {}, True),
        ({"avx512_bf16"}, {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, True),
        ({"avx512_bf16", "amx_bf16"}, {"ONEDNN_MAX_CPU_ISA": "avx512_core_bf16"}, True),
        ({"avx512_bf16", "amx_bf16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
        ({"amx_bf16"}, {"DNNL_MAX_CPU_ISA": "avx2"}, False),
        ({"avx512_vnni"}, {"ONEDNN_MAX_CPU_ISA": "ALL"}, False),
    ],
)
def test_bf16_is_fast_where_the_processor_has_it_and_onednn_may_use_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], bound: dict[str, str], fast: bool
) -> None:
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in bound.items():
        monkeypatch.setenv(name, value)
    assert device.device_facts("cpu").bf16_fast is fast


@pytest.mark.parametrize(
    ("flags", "precision", "side"),
    [
        ({"avx2"}, "bf16", device.SLOW_SIDE),  # a product of 1024 takes it seconds
        ({"avx2"}, "fp32", 1024),
        ({"avx512_bf16"}, "bf16", 1024),
        ({"avx512_bf16"}, "fp16", device.SLOW_SIDE),
    ],
)
def test_the_product_is_small_where_the_processor_lacks_the_type(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], precision: str, side: int
) -> None:
    seen: list[int] = []
    for name in device._ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_processor", lambda: ("a processor", frozenset(flags)))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.append(len(left)))
    measured_peak.cache_clear()
    measured_peak("cpu", precision, 0)
    measured_peak.cache_clear()
    assert set(seen) == {side}
