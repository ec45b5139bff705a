"""What a prediction says follows from its bytes."""

from dataclasses import replace

import pytest

from tuner.profile import devices
from tuner.profile.prediction import NAMES, PARTS, MemoryMoment, MemoryTimeline, Part, Phase, Prediction, TimeEstimate
from tuner.profile.report import plain, sentence, table


def moment(phase: Phase, module: str, **parts: int) -> MemoryMoment:
    named: dict[Part, int] = dict.fromkeys(PARTS, 0)
    return MemoryMoment(phase, module, {**named, **parts})  # type: ignore[dict-item]


COURSE = MemoryTimeline(
    (
        moment("forward", "model.layers.0", parameters=40, activations=10),
        moment("forward", "model.layers.1", parameters=40, activations=20),
        moment("backward", "model.layers.1", parameters=40, activations=20, gradients=40),
        moment("optimizer", "", parameters=40, gradients=40, optimizer=10, other=10),
    ),
    {"model.layers.0": 10, "model.layers.1": 10, "": 0},
)


TIME = TimeEstimate({"products": 1e12}, 8192.0, 2.0, 10, "tabled")


def test_peak_is_the_first_of_the_fullest_moments() -> None:
    assert COURSE.peak.phase == "backward" and COURSE.peak.total == 100
    forward = COURSE.peak_of("forward")
    assert forward is not None and (forward.module, forward.total) == ("model.layers.1", 60)
    assert COURSE.peak_of("evaluation") is None


@pytest.mark.parametrize(("limit", "verdict"), [(99, "does not fit"), (100, "tight"), (101, "tight"), (102, "fits")])
def test_verdict_allows_for_the_stated_error(limit: int, verdict: str) -> None:
    prediction = Prediction("cpu", "cpu", 1, 1, COURSE, limit, 0.02, TIME)
    assert prediction.verdict == verdict
    assert prediction.margin_bytes == limit - 100
    assert replace(prediction, error=0.0).verdict == ("fits" if limit >= 100 else "does not fit")


def test_a_prediction_decides_only_for_devices_that_it_was_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Prediction("cpu, 2 cores", "cpu", 1, 1, COURSE, 99, 0.02, TIME)
    assert here.verified and here.refuses and not here.warnings and not replace(here, limit_bytes=102).refuses
    there = replace(here, device="NVIDIA L40S", device_kind="cuda")
    assert there.verdict == "does not fit" and not there.verified and not there.refuses
    assert "predictions for NVIDIA L40S are unverified" in there.warnings[0]
    assert "stated error 2%, unverified" in sentence(there) and "unverified" not in sentence(here)
    assert (plain(there)["verified"], plain(here)["verified"]) == (False, True)
    assert not replace(there, limit_bytes=102).warnings
    monkeypatch.setattr(devices, "stated_error", {"NVIDIA L40S": 0.03}.get)
    assert there.verified and there.refuses and not replace(there, device="NVIDIA H100 SXM").verified


def test_time_follows_from_the_step() -> None:
    assert (TIME.tok_per_s, TIME.total_s) == (4096.0, 20.0)


def test_a_sentence_tells_tensors_from_the_process() -> None:
    mib = 1 << 20
    course = MemoryTimeline(
        (moment("forward", "", parameters=300 * mib, activations=100 * mib, constants=600 * mib),), {}
    )
    prediction = Prediction("cpu", "cpu", 1, 1, course, 2000 * mib, 0.02, TIME)
    assert (prediction.tensor_bytes, prediction.process_bytes) == (400 * mib, 600 * mib)
    said = sentence(prediction)
    assert said.startswith("peak 0.98 GiB: tensors 400.0 MiB (weights 300.0 MiB, activations 100.0 MiB), the process")
    assert "itself 0.59 GiB · fits in 1.95 GiB" in said
    lines = [[cell for cell in line if cell] for line in table(prediction)]
    assert lines == [
        ["MiB", "peak", "forward"], ["weights", "300.0", "300.0"], ["activations", "100.0", "100.0"],
        ["tensors", "400.0", "400.0"], ["process", "600.0", "600.0"], ["total", "1,000.0", "1,000.0"],
    ]  # fmt: skip
    assert set(NAMES) == set(PARTS) and len(set(NAMES.values())) == len(PARTS)
