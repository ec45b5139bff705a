"""Charts as a PNG, for places that show no pages: drawn large and made smaller, which smooths lines."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tuner.errors import MachineError
from tuner.ladder.charts import Chart
from tuner.ladder.points import short

try:
    from PIL import Image, ImageDraw, ImageFont, PngImagePlugin
except ImportError as error:
    raise MachineError(
        "a picture needs the library pillow", hint="install it: pip install pillow; or write a page: --output plan.html"
    ) from error

WIDTH, HEIGHT, COLUMNS = 900, 400, 2
FINER = 3
"""How many times larger it is drawn."""
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 58, 46
INK, SOFT, GRID, PAPER = "#1c2330", "#667085", "#e3e7ee", "#ffffff"
COLORS = ("#2f6fde", "#e06c1f", "#1a9d6c", "#b9459f", "#8a6d00", "#0d93b0", "#d33b4c", "#6b5bd2")
"""As on the pages."""
Place = Callable[[Sequence[float]], tuple[float, float]]


def picture(title: str, charts: Sequence[Chart], mark: str) -> bytes:
    """The bytes of a PNG: the first chart as wide as it, the others below in two columns; `mark` is its software."""
    rows = math.ceil((len(charts) - 1) / COLUMNS)
    image = Image.new("RGB", (COLUMNS * WIDTH * FINER, (HEIGHT * (1 + rows) + TOP) * FINER), PAPER)
    pen = ImageDraw.Draw(image)
    _write(pen, (LEFT, 16), title, INK, 22)
    for number, chart in enumerate(charts):
        row, column = (0, 0) if number == 0 else (1 + (number - 1) // COLUMNS, (number - 1) % COLUMNS)
        width = COLUMNS * WIDTH if number == 0 else WIDTH
        _draw(pen, chart, (column * WIDTH, TOP + row * HEIGHT, column * WIDTH + width, TOP + (row + 1) * HEIGHT))
    about, held = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_text("Software", mark)
    small = image.resize((image.width // FINER, image.height // FINER), Image.Resampling.LANCZOS)
    small.save(held, "PNG", pnginfo=about)
    return held.getvalue()


def _draw(pen: Any, chart: Chart, box: tuple[int, int, int, int]) -> None:
    """One chart into a box (left, top, right, bottom)."""
    places = [place for series in chart["series"] for place in (*series.get("curve", ()), *series.get("dots", ()))]
    left, right, high = min(p[0] for p in places), max(p[0] for p in places), max(p[1] for p in places) * 1.05
    x0, y0, x1, y1 = box[0] + LEFT, box[1] + TOP, box[2] - RIGHT, box[3] - BOTTOM
    along = (lambda v: math.log(v / left) / math.log(right / left)) if chart["xLog"] else (lambda v: v / right)

    def at(place: Sequence[float]) -> tuple[float, float]:
        return x0 + along(place[0]) * (x1 - x0), y1 - place[1] / high * (y1 - y0)

    _write(pen, (x0, box[1] + 8), chart["label"], INK, 17)
    _write(pen, (x0 - 70, box[1] + 33), chart["y"], SOFT, 13)
    _write(pen, ((x0 + x1) / 2, y1 + 26), chart["x"], SOFT, 13, "ma")
    curves = [series for series in chart["series"] if "curve" in series]
    for number, series in enumerate(curves if len(curves) > 1 else ()):
        _write(pen, (x0 + 330 + 90 * number, box[1] + 10), series["name"], COLORS[series["color"] % len(COLORS)], 15)
    for value in _even(high):
        (_, y) = at((right, value))
        pen.line([(x0 * FINER, y * FINER), (x1 * FINER, y * FINER)], fill=GRID, width=FINER)
        _write(pen, (x0 - 8, y), short(value) if value >= 1 else f"{value:.3g}", SOFT, 12, "rm")
    for value in _decades(left, right) if chart["xLog"] else _even(right):
        (x, _) = at((value, 0.0))
        _write(pen, (x, y1 + 8), short(value), SOFT, 12, "ma")
    for series in chart["series"]:
        _series(pen, series, at)


def _series(pen: Any, series: dict[str, Any], at: Place) -> None:
    color = COLORS[series["color"] % len(COLORS)]
    if "curve" in series:
        line = [(x * FINER, y * FINER) for x, y in map(at, series["curve"])]
        pen.line(line, fill=color, width=2 * FINER, joint="curve")
    for x, y in map(at, series.get("dots", ())):
        fill, radius = (PAPER if series.get("hollow") else color), 4.5
        ends = [(x - radius) * FINER, (y - radius) * FINER, (x + radius) * FINER, (y + radius) * FINER]
        pen.ellipse(ends, fill=fill, outline=color, width=2 * FINER)


def _write(pen: Any, at: tuple[float, float], text: str, color: str, size: int, anchor: str = "la") -> None:
    font = ImageFont.load_default(size * FINER)
    pen.text((at[0] * FINER, at[1] * FINER), text, fill=color, font=font, anchor=anchor)


def _even(high: float) -> Iterator[float]:
    """Round values from 0 to `high`, four to eight of them."""
    raw = high / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return (i * step for i in range(int(high / step) + 1))


def _decades(low: float, high: float) -> list[float]:
    """Round values of a logarithmic axis."""
    factors = (1,) if high / low > 1e4 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [f * 10.0**power for power in powers for f in factors if low <= f * 10.0**power <= high]
