"""What a prediction says follows from its bytes.

The page of a profile: one file without anything beside it, right, readable, and told apart by every eye.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, chromium
from tuner.errors import RecipeError
from tuner.profile import devices, report
from tuner.profile.prediction import NAMES, PARTS, MemoryMoment, MemoryTimeline, Part, Phase, Prediction, TimeEstimate
from tuner.profile.report import check_output, plain, sentence, table
from tuner.rundir.curves import filled


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


SIZES = {"parameters": 100 << 20, "optimizer": 200 << 20, "gradients": 100 << 20, "activations": 60 << 20}
WIDE = ("parameters", "gathered", "optimizer", "gradients", "activations", "loss", "other")


def figures(predicted: bool = True, measured: bool = True) -> dict[str, Any]:
    """A made-up profile of four modules."""
    peak = sum(SIZES.values())
    moments = [
        {"phase": phase, "module": f"model.layers.{i}", "parts": SIZES | {"activations": size << 20}}
        for phase, sizes in (("forward", (20, 40, 60)), ("backward", (60, 30, 0)))
        for i, size in enumerate(sizes)
    ]
    time = {
        "flops": {"layers": 9e12, "output": 1e12}, "tokens_per_step": 4096.0, "step_s": 2.0, "total_steps": 40,
        "basis": "By the peak.", "tok_per_s": 2048.0, "total_s": 80.0,
    }  # fmt: skip
    return {
        "title": "orders </script><b>", "subtitle": "tiny · cpu", "verdict": "does not fit", "limit_bytes": 400 << 20,
        "total_steps": 40, "way_out": "--train.micro_batch_size 1", "names": dict(NAMES),
        "holders": [{"owner": "model.embed_tokens.weight", "part": "optimizer", "bytes": 50 << 20}] if measured else [],
        "measured": None if not measured else {
            "memory": {
                "peak_bytes": peak, "parts": SIZES, "phases": {"forward": peak}, "seconds": [0.0, 0.5, 1.0],
                "series": {part: [size // 2, size, size // 2] for part, size in SIZES.items()},
                "marks": [["forward", 0.0], ["backward", 0.5]],
            },
            "steps": 2, "step_s": 1.0, "times": {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1},
            "communication_s": 0.2, "flops": 1e11, "peak_flops": 4e11, "datasheet_flops": None, "mfu": 0.25,
            "tok_per_s": 4096.0, "trained_per_s": 2000.0, "tokens_per_step": 4096.0, "data_wait": 0.1,
            "estimate_s": 40.0, "resident_bytes": 3 << 30,
        },
        "predicted": None if not predicted else {
            "peak_bytes": peak + (10 << 20), "tensor_bytes": peak, "process_bytes": 10 << 20, "error": 0.02,
            "verdict": "does not fit", "parts": SIZES, "verified": False,
            "counted": SIZES, "counted_bytes": peak,
            "course": moments, "assumptions": ["Rows are full."], "time": time,
        },
    }  # fmt: skip


@pytest.mark.skipif(chromium() is None, reason="no Chromium on the path; set TUNER_TEST_CHROMIUM to one")
@pytest.mark.parametrize(("predicted", "measured"), [(True, True), (True, False), (False, True)])
def test_the_page_in_a_browser(tmp_path: Path, predicted: bool, measured: bool) -> None:
    path = tmp_path / "report.html"
    path.write_text(filled(report._TEMPLATE, figures(predicted, measured)))
    program = chromium()
    assert program is not None
    with Browser(program, tmp_path) as browser:
        for dark in (False, True):
            browser.open(path, dark)
            assert browser.run("document.documentElement.scrollWidth") <= 1280  # nothing to scroll to
            assert browser.run("document.querySelector('h1').textContent") == "orders </script><b>"
            text = browser.run("document.body.innerText")
            assert "✕ Does not fit" in text and "this fits: --train.micro_batch_size 1" in text
            assert ("Time of a step" in text, "Largest at the peak" in text) == (True, measured)
            assert ("Assumptions" in text) == predicted
            assert ("unverified" in text) == (predicted and not measured)
            labels = browser.run("[...document.querySelectorAll('svg')].map(one => one.getAttribute('aria-label'))")
            assert len(labels) == predicted + measured and all("highest 460 MiB" in label for label in labels)
            shown = browser.run("[...document.querySelectorAll('path')].map(one => one.getBBox().height)")
            assert len(shown) == 4 * (predicted + measured) and all(height > 5 for height in shown)
        browser.run("document.querySelector('.plot').focus()")
        browser.run("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))")
        tip = browser.run("document.querySelector('.tip').innerText")
        assert "optimizer" in tip and "MiB" in tip
        assert browser.said == []


def test_the_page_needs_nothing_else() -> None:
    text = filled(report._TEMPLATE, figures())
    assert not re.search(r"""(?:src|href)=["'](?!data:)|@import|url\(|https?://(?!www\.w3\.org)""", text)
    assert "default-src 'none'" in text
    inside = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inside) == figures()


def palette(theme: str) -> dict[str, tuple[float, ...]]:
    """The colours of a theme, each as red, green and blue from 0 to 1."""
    text = report._TEMPLATE.read_text(encoding="utf-8")
    light = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", text.split("}")[0]))
    chosen = light if theme == "light" else light | dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", text.split("}")[1]))
    return {name: tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)) for name, code in chosen.items()}


def linear(color: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in color)


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The ratio of WCAG 2."""
    light = sorted(sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


# How colours look without one kind of cone (Machado, Oliveira, Fernandes 2009, severity 1).
BLINDNESS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(color: tuple[float, ...]) -> tuple[float, float, float]:
    """Oklab, in which distances are those that people see (Ottosson 2020)."""
    r, g, b = color
    l_, m, s = (
        max(0.0, x) ** (1 / 3)
        for x in (
            0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
            0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
            0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
        )
    )
    return (
        0.2104542553 * l_ + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l_ - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l_ + 0.7827717662 * m - 0.8086757660 * s,
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_their_ground(theme: str) -> None:
    colors = palette(theme)
    for name in ("ink", "soft", "good", "warn", "bad"):
        assert contrast(colors[name], colors["card"]) >= 4.5, name
    assert contrast(colors["card"], colors["accent"]) >= 4.5  # a pressed button


@pytest.mark.parametrize("blindness", [None, *BLINDNESS])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neighbours_in_the_stack_are_told_apart(theme: str, blindness: str | None) -> None:
    colors = palette(theme)
    seen = {}
    for name in WIDE:
        color = linear(colors[name])
        if blindness is not None:
            color = tuple(sum(w * v for w, v in zip(row, color, strict=True)) for row in BLINDNESS[blindness])
        seen[name] = lab(color)
    # Whatever lies next to each other where the parts between are missing.
    for i, one in enumerate(WIDE):
        for other in WIDE[i + 1 :]:
            apart = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
            assert apart > 0.06, (one, other, round(apart, 3))


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    check_output(tmp_path / "new")
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(RecipeError, match="something else than a profile"):
        check_output(tmp_path)
    (tmp_path / "report.html").write_text(filled(report._TEMPLATE, figures()))
    check_output(tmp_path)
    with pytest.raises(RecipeError, match="not a directory"):
        check_output(tmp_path / "report.html")
