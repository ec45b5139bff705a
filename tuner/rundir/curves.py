"""Curves of runs: the columns of metrics.jsonl over steps, tokens and time, thinned to what a screen can show.

Drawn in a terminal with characters, two by four dots of braille in each cell or a letter for each run, or as one HTML
file that needs nothing else: no network, no library, no other file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tuner.config.yaml import flow
from tuner.errors import RecipeError
from tuner.rundir.record import Line, Run, differing, summary
from tuner.runtime.files import write_atomic

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
        fewer.step.append(points.step[stop - 1])
        fewer.tokens.append(points.tokens[stop - 1])
        fewer.seconds.append(points.seconds[stop - 1])
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


LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
AXIS_WIDTH = 11
"""Cells left of the plot: a number and the axis."""

Span = tuple[str, int | None]
"""Text, and the run whose colour it has."""


class Frame(NamedTuple):
    """Cells of a plot, and the values at its edges."""

    columns: int
    rows: int
    low: float
    high: float


def draw(chart: Chart, width: int, rows: int, letters: bool = False) -> list[list[Span]]:
    """The lines of a chart, each as spans: its name, `rows` cells of plot, and the axis of steps.

    Curves of single sources are left out. With `letters` each run has its letter instead of a colour.
    """
    curves = [curve for curve in chart.curves if not curve.source] or chart.curves
    columns = max(8, width - AXIS_WIDTH)
    last_step = max(curve.points.step[-1] for curve in curves)
    means = [(curve.run, _means(curve, columns, last_step)) for curve in curves]
    low, high = _range([value for _, points in means for value in points.values()])
    frame = Frame(columns, rows, low, high)
    cells = _cells(means, frame, letters)
    unit = f" ({chart.unit})" if chart.unit and chart.unit != "%" else ""
    lines: list[list[Span]] = [[(f"{'':{AXIS_WIDTH}}{chart.label}{unit}", None)]]
    for row, line in enumerate(cells):
        value = frame.high - (frame.high - frame.low) * row / max(1, rows - 1)
        label = shown(chart, value) if row in {0, rows // 2, rows - 1} else ""
        lines.append([(f"{label:>{AXIS_WIDTH - 2}} {'┤' if label else '│'}", None), *line])
    last = f"step {last_step:,.0f}"
    lines.append([(f"{'':{AXIS_WIDTH - 1}}└{'─' * max(0, columns - len(last) - 1)} {last}", None)])
    return lines


def shown(chart: Chart, value: float) -> str:
    """A value on a chart's axis: a share in percent, everything else as a number."""
    return f"{value:.1%}" if chart.unit == "%" else number(value)


def number(value: float) -> str:
    """A number in at most 9 characters."""
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e5:
        return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return f"{value:.2e}"


def _means(curve: Curve, columns: int, last_step: float) -> dict[int, float]:
    """Column of dots -> the mean of the values that fall into it."""
    found: dict[int, list[float]] = {}
    for step, value in zip(curve.points.step, curve.points.value, strict=True):
        if value is not None:
            found.setdefault(round(step / (last_step or 1) * (columns * 2 - 1)), []).append(value)
    return {x: sum(values) / len(values) for x, values in sorted(found.items())}


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > abs(high) * 1e-9:
        return low, high
    return low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2


def _cells(curves: Sequence[tuple[int, dict[int, float]]], frame: Frame, letters: bool) -> list[list[Span]]:
    """The plot's rows of cells; where curves meet, the later one is seen."""
    dots = [[0] * frame.columns for _ in range(frame.rows)]
    owner: list[list[int | None]] = [[None] * frame.columns for _ in range(frame.rows)]
    for run, means in curves:
        for x, y in _trace(means, frame):
            row, column = y // 4, x // 2
            if owner[row][column] != run:
                dots[row][column], owner[row][column] = 0, run
            dots[row][column] |= _DOTS[x % 2][y % 4]
    return [
        [_cell(bits, run, letters) for bits, run in zip(*line, strict=True)] for line in zip(dots, owner, strict=True)
    ]


def _cell(bits: int, run: int | None, letters: bool) -> Span:
    if run is None:
        return " ", None
    return (LETTERS[run % len(LETTERS)] if letters else chr(0x2800 + bits)), run


def _trace(means: dict[int, float], frame: Frame) -> list[tuple[int, int]]:
    """The dots of a curve from left to right, joined where the next one is far away."""
    found: list[tuple[int, int]] = []
    for x, mean in means.items():
        y = round((frame.high - mean) / (frame.high - frame.low) * (frame.rows * 4 - 1))
        if found:
            found += _between(found[-1], (x, y))
        found.append((x, y))
    return found


def _between(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(stop[0] - start[0]), abs(stop[1] - start[1]))
    return [
        (round(start[0] + (stop[0] - start[0]) * i / steps), round(start[1] + (stop[1] - start[1]) * i / steps))
        for i in range(1, steps)
    ]


MARK = b"<!doctype html><!-- tuner runs plot -->"
"""How every page begins: only such a file is written over."""
BEGINNING = 120
"""Bytes within which a file's mark lies."""
_TEMPLATE = Path(__file__).with_name("page.html")
_HEAD = Path(__file__).with_name("head.html")
"""What every page has after its mark: what it may load, which is nothing, colours, and rules of what is on several."""
_PLACE, _PLACE_OF_HEAD = "@@DATA@@", "@@HEAD@@"
SMOOTHING, SMOOTHED_POINTS = 0.8, 200
"""How much curves of so many points are smoothed at first; shorter ones are not, and end at their last value."""


def write_page(path: Path, runs: Sequence[Run], drawn: Sequence[Chart], smoothing: float | None) -> None:
    """Write the page of some runs. Raises RecipeError where `path` holds something else, MachineError."""
    require_own(path, MARK, "curves")
    write_atomic(path, page(runs, drawn, smoothing).encode())


def require_own(path: Path, mark: bytes, what: str) -> None:
    """Raise RecipeError where something is at `path` that is no file with the mark of its kind near its beginning."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_file() or path.is_symlink():
        raise RecipeError(f"{path} is not a file", hint="choose another one with --output")
    with path.open("rb") as file:
        if mark not in file.read(BEGINNING):
            raise RecipeError(f"{path} holds something else than {what}", hint="choose another one with --output")


def page(runs: Sequence[Run], drawn: Sequence[Chart], smoothing: float | None) -> str:
    """The page's text; `smoothing` in [0, 1) is where its slider begins, None suits the number of points."""
    if smoothing is None:
        most = max((len(curve.points.step) for chart in drawn for curve in chart.curves), default=0)
        smoothing = SMOOTHING if most >= SMOOTHED_POINTS else 0.0
    recipes = [run.recipe for run in runs]
    keys = differing(recipes)
    about = [
        {
            **_finite(summary(run)),
            "resumed": sorted({int(launch.get("from_step") or 0) for launch in run.launches[1:]} - {0}),
            "differs": {key: flow(recipe[key]) if key in recipe else "" for key in keys},
        }
        for run, recipe in zip(runs, recipes, strict=True)
    ]
    data: dict[str, Any] = {"smoothing": smoothing, "runs": about, "charts": [asdict(chart) for chart in drawn]}
    return filled(_TEMPLATE, data)


def filled(template: Path, figures: Mapping[str, Any]) -> str:
    """The text of a page with the figures that its script draws."""
    # Inside a script element only `<` could end it; JSON knows an escape for it.
    text = json.dumps(figures, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    with_head = template.read_text(encoding="utf-8").replace(_PLACE_OF_HEAD, _HEAD.read_text(encoding="utf-8"))
    before, after = with_head.split(_PLACE)
    return f"{before}{text}{after}"


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN: they become text."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in figures.items()
    }
