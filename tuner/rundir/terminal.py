"""Curves drawn with characters: two by four dots of braille in each cell, or a letter for each run."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.rundir.curves import Chart, Curve

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
AXIS_WIDTH = 11
"""Cells left of the plot: a number and the axis."""

Span = tuple[str, int | None]
"""Text, and the run whose colour it has."""


@dataclass(frozen=True)
class Frame:
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
