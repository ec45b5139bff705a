"""Curves of runs: the columns of metrics.jsonl over steps, tokens and time, thinned to what a screen can show."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.rundir.record import Line, Run

_TABLE: dict[str, dict[str, tuple[str, str]]] = json.loads(
    Path(__file__).with_name("curves.json").read_text(encoding="utf-8")
)
OF_EVALUATION = "eval "
"""What the key of a chart begins with whose values are evaluations', of another metric than the loss."""
LABELS = dict(_TABLE["losses"])
for _name, (_label, _unit) in _TABLE["figures"].items():
    LABELS |= {_name: (_label, _unit), f"{OF_EVALUATION}{_name}": (f"{_label} in evaluations", _unit)}
LABELS |= _TABLE["others"]
"""Label and unit of charts in the order in which they are shown; further metrics follow under their own names.

Values in `%` are shares: 0.5 is 50 %.
"""
PER_TOKEN = frozenset({"sft", "pretrain"})
MEASURED_PER_TOKEN = PER_TOKEN | {"custom"}
"""Kinds of methods whose loss, in steps and in evaluations, is a mean over tokens: that of others has no unit."""
MEMORY = {"cpu": "peak memory of the process (RSS)", "cuda": "peak memory allocated on the GPU"}
"""What `mem_gib` is, by the device of a run."""
POSITIONS = frozenset(
    {"kind", "step", "epoch", "tokens", "step_s", "data_s", "eval_s", "samples_s", "tasks_s", "internals_s", "check_s",
     "elapsed_s"}
)
"""Numbers of a line that say where and when, and are no curves."""
BY_SOURCE = frozenset({"eval", "internals"})
"""Kinds of lines whose names have a source of data, or a layer, after a slash."""
MAX_POINTS = 1500
"""Points of one curve; longer ones are averaged, and keep their highest and lowest values."""


@dataclass
class Points:
    """Places on the axes and a value at each: `None` where it is not finite or missing."""

    step: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    value: list[float | None] = field(default_factory=list)
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    """The lowest and highest value that a point stands for; empty where each stands for one."""


@dataclass(frozen=True)
class Curve:
    """One run's values of one metric; `source` is the evaluation source or the layer, or empty for all of them."""

    run: int
    source: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """The curves of one metric."""

    key: str
    label: str
    curves: list[Curve]
    unit: str = ""


def charts(runs: Sequence[Run], max_points: int = MAX_POINTS) -> list[Chart]:
    """The charts of some runs; metrics without a finite value are left out. Raises DataError for unreadable files."""
    found: dict[str, list[Curve]] = {}
    for number, run in enumerate(runs):
        for (key, source), points in _columns(run).items():
            if any(value is not None for value in points.value):
                found.setdefault(key, []).append(Curve(number, source, thinned(points, max_points)))
    order = [*(key for key in LABELS if key in found), *sorted(found.keys() - LABELS)]
    return [_chart(key, found[key], runs) for key in order]


def _chart(key: str, curves: list[Curve], runs: Sequence[Run]) -> Chart:
    """A chart with its label and unit, as far as these runs agree on them."""
    label, unit = LABELS.get(key, (key, ""))
    kinds = {str(run.recipe.get("method.kind", "sft")) for run in runs}
    if key in {"loss", "eval"} and kinds - (PER_TOKEN if key == "loss" else MEASURED_PER_TOKEN):
        unit = ""
    if "custom" in kinds and key.removeprefix(OF_EVALUATION) in _TABLE["figures"]:
        label, unit = key, ""  # whatever the user's own loss means by it
    if key == "mem_gib":
        devices = {str(run.recipe.get("train.device")) for run in runs}
        label = MEMORY.get(devices.pop(), label) if len(devices) == 1 else label
    return Chart(key, label, curves, unit)


def thinned(points: Points, most: int) -> Points:
    """At most `most` points: means of neighbours, with the lowest and highest of each group."""
    count = len(points.step)
    if count <= most:
        return points
    fewer = Points()
    bounds = [round(i * count / most) for i in range(most + 1)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        values = [value for value in points.value[start:stop] if value is not None]
        for target, places in (
            (fewer.step, points.step),
            (fewer.tokens, points.tokens),
            (fewer.seconds, points.seconds),
        ):
            target.append(places[stop - 1])
        fewer.value.append(math.fsum(values) / len(values) if values else None)
        fewer.low.append(min(values, default=None))
        fewer.high.append(max(values, default=None))
    return fewer


def _columns(run: Run) -> dict[tuple[str, str], Points]:
    """(metric, source) -> its values in the order of the file."""
    columns: dict[tuple[str, str], Points] = {}
    tokens = seconds = 0.0
    for line in run.lines():
        tokens = _number(line.get("tokens")) or tokens
        seconds += (_number(line.get("step_s")) or 0.0) + (_number(line.get("eval_s")) or 0.0)
        for name, value in line.items():
            if name in POSITIONS or isinstance(value, (str, bool)) or value is None:
                continue
            points = columns.setdefault(_chart_of(line, name), Points())
            points.step.append(line["step"])
            points.tokens.append(tokens)
            points.seconds.append(round(seconds, 3))
            points.value.append(_number(value))
    return columns


def _chart_of(line: Line, name: str) -> tuple[str, str]:
    """The chart and the source that a value belongs to."""
    if line.get("kind") not in BY_SOURCE:
        return name, ""
    metric, _, source = name.partition("/")
    if line["kind"] == "internals":
        return metric, source
    return ("eval" if metric == "loss" else f"{OF_EVALUATION}{metric}"), source


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
