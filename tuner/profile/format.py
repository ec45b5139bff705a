"""Predictions and choices in words, for people, and as plain values, for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tuner.profile.fit import SHOWN, Choice
from tuner.profile.measurement import duration_text
from tuner.profile.prediction import PARTS, Moment, Part, Prediction
from tuner.runtime.files import gib

SMALL = 0.005
"""Parts below this share of the peak are left out of a sentence."""
NAMES: Mapping[Part, str] = {
    "parameters": "weights",
    "gathered": "gathered weights",
    "reduced": "gradients on their way",
    "loss": "logits and loss",
    "staging": "copy to save",
    "rounding": "allocator's rounding",
}


def sentence(prediction: Prediction) -> str:
    """A prediction on one line: the peak by part, whether it fits, and how long the run takes."""
    peak = prediction.memory.peak
    sizes = sorted(((size, part) for part, size in peak.parts.items()), reverse=True)
    parts = ", ".join(
        f"{NAMES.get(part, part)} {_size(size, peak.total)}" for size, part in sizes if size > SMALL * peak.total
    )
    of = f" in each of {prediction.processes} processes" if prediction.processes > 1 else ""
    limit = f"{prediction.verdict} in {gib(prediction.limit_bytes)} (stated error {prediction.error:.0%})"
    return f"peak {gib(peak.total)}{of} ({parts}) · {limit}{_time(prediction)}"


def table(prediction: Prediction) -> list[list[str]]:
    """Bytes by part, a line each, at the peak of all and of each phase; the first line names the columns."""
    phases = list(dict.fromkeys(moment.phase for moment in prediction.memory.moments))
    moments = [moment for phase in phases if (moment := prediction.memory.peak_of(phase)) is not None]
    lines = [["", "peak", *(moment.phase for moment in moments)]]
    shown = [prediction.memory.peak, *moments]
    for part in PARTS:
        if any(moment.parts[part] for moment in shown):
            lines.append([NAMES.get(part, part), *(_cell(moment.parts[part]) for moment in shown)])
    return [*lines, ["all", *(_cell(moment.total) for moment in shown)]]


def choices_table(choices: Sequence[Choice]) -> list[list[str]]:
    """The choice and its runners-up, a line each."""
    lines = [["", "peak", "s a step", "overrides"]]
    for number, choice in enumerate(choices[:SHOWN]):
        name = "choice" if number == 0 else "or"
        lines.append([name, gib(choice.prediction.peak_bytes), f"{choice.step_s:.3g}", flags(choice)])
    return lines


def flags(choice: Choice) -> str:
    """The overrides as they are typed."""
    return " ".join(f"--{key} {text(value)}" for key, value in choice.overrides.items()) or "(none)"


def text(value: object) -> str:
    """A value as a recipe has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain values, with what follows from it; of the timeline the peak of each phase."""
    tree = asdict(prediction)
    time = prediction.time
    memory = prediction.memory
    peaks = {moment.phase: moment for moment in memory.moments}
    tree["memory"] = {
        "layers": dict(memory.layers),
        "peak": _plain(memory.peak),
        "phases": {phase: _plain(found) for phase in peaks if (found := memory.peak_of(phase)) is not None},
    }
    tree["time"] |= {"tok_per_s": time.tok_per_s, "total_s": time.total_s}
    return {
        **tree,
        "verdict": prediction.verdict,
        "peak_bytes": prediction.peak_bytes,
        "margin_bytes": prediction.margin_bytes,
    }


def _plain(moment: Moment) -> dict[str, Any]:
    return {**asdict(moment), "total": moment.total}


def _time(prediction: Prediction) -> str:
    time = prediction.time
    step = f" · roughly {duration_text(time.step_s)} a step, {time.tok_per_s:,.0f} tokens a second"
    return step if time.total_s is None else f"{step}, {time.total_steps:,} steps in {duration_text(time.total_s)}"


def _size(size: int, whole: int) -> str:
    return f"{size / 2**30:.2f}" if whole >= 1 << 30 else f"{size / 2**20:.1f}"


def _cell(size: int) -> str:
    return gib(size) if size else ""
