"""Curves as one HTML file that needs nothing else: no network, no library, no other file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.config.yaml import flow
from tuner.errors import RecipeError
from tuner.rundir.curves import Chart
from tuner.rundir.record import Run, differing, summary
from tuner.runtime.files import write_atomic

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
            "resumed": _resumed(run),
            "differs": {key: flow(recipe[key]) if key in recipe else "" for key in keys},
        }
        for run, recipe in zip(runs, recipes, strict=True)
    ]
    data: dict[str, Any] = {"smoothing": smoothing, "runs": about, "charts": [asdict(chart) for chart in drawn]}
    return filled(_TEMPLATE, data)


def _resumed(run: Run) -> list[int]:
    """The steps from which launches after the first resumed."""
    return sorted({int(launch.get("from_step") or 0) for launch in run.launches[1:]} - {0})


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
