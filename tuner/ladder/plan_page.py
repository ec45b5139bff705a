"""Learning rates and marks of a ladder's rungs over their tokens: one HTML file that needs nothing else, or a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tuner.config.ladder import short_count
from tuner.errors import RecipeError
from tuner.ladder.charts import Chart, Series, chart
from tuner.ladder.launch import PlannedRung
from tuner.ladder.rungs import Rung
from tuner.rundir.curves import filled, require_own
from tuner.runtime.console import clock
from tuner.runtime.files import gib, write_atomic
from tuner.train.plan import Schedule, build_schedule, plan_steps

MARK = b"<!doctype html><!-- tuner ladder plan -->"
PNG_MARK = b"tuner ladder plan"
"""What is near the beginning of every page and picture: only such a file is written over."""
SUFFIXES = (".html", ".png")
PLACES = 240
"""Steps of a drawn curve, besides those at which something begins or ends."""
PLAN = ("rung", "N", "all", "tokens/step", "off", "processes", "accumulation", "micro", "steps", "tokens", "lr",
        "warm-up", "FLOPs", "memory", "time")  # fmt: skip
_TEMPLATE = Path(__file__).with_name("fit.html")


def plan_lines(planned: Sequence[PlannedRung]) -> list[list[str]]:
    """The plans of rungs as texts, in the columns of `PLAN`."""
    return [
        [
            rung["name"], f"{rung['parameters']:,}", f"{rung['total_parameters']:,}", f"{rung['batch_tokens']:,}",
            f"{100 * rung['off']:.1f}%", str(rung["processes"]), str(rung["accumulation"]), f"{rung['micro_tokens']:,}",
            f"{rung['total_steps']:,}", short_count(rung["tokens"]),
            "auto" if rung["lr"] is None else f"{rung['lr']:.3g}", f"{rung['warmup_steps']:,}",
            f"{rung['flops']:.2e}" if rung["flops"] else "-",
            "-" if rung["memory_bytes"] is None else _memory(rung["memory_bytes"], rung["fits"]),
            "-" if rung["seconds"] is None else clock(rung["seconds"]),
        ]
        for rung in (one.plain() for one in planned)
    ]


def _memory(size: int, verdict: str) -> str:
    return gib(size) if verdict == "fits" else f"{gib(size)} ({verdict})"


def check_output(path: Path) -> None:
    """Raise RecipeError where a file is neither a page nor a picture by its name, or would be written over."""
    if path.suffix not in SUFFIXES:
        hint = "name it --output plan.html, or --output plan.png"
        raise RecipeError(f"{path}: neither a page nor a picture", hint=hint)
    require_own(path, MARK if path.suffix == ".html" else PNG_MARK, "a ladder's plan")


def write_plan(path: Path, title: str, planned: Sequence[PlannedRung]) -> None:
    """Write the page or the picture to a path that `check_output` looked at. Raises MachineError."""
    charts = charts_of([one.rung for one in planned])
    if path.suffix == ".html":
        write_atomic(path, plan_page(title, charts, planned).encode())
        return
    from tuner.ladder.picture import picture

    write_atomic(path, picture(title, charts, PNG_MARK.decode()))


def plan_page(title: str, charts: Sequence[Chart], planned: Sequence[PlannedRung]) -> str:
    """The page's text."""
    subtitle = f"plan of {len(planned)} rungs; filled dots are marks after a decay, hollow ones before it"
    data: dict[str, Any] = {
        "title": title, "subtitle": subtitle, "figures": None, "charts": charts, "notes": [],
        "rungs": [one.rung.name for one in planned], "table": [PLAN, *plan_lines(planned)],
    }  # fmt: skip
    _, _, rest = filled(_TEMPLATE, data).partition("\n")
    return f"{MARK.decode()}\n{rest}"


def charts_of(rungs: Sequence[Rung]) -> list[Chart]:
    """All rungs together over a logarithmic axis of tokens, then each of several by itself."""
    drawn = [_series(rung, number) for number, rung in enumerate(rungs)]
    y = "learning rate" if all(rung.lr for rung in rungs) else "share of the peak learning rate, which is auto"
    whole = chart("Learning rate and marks over tokens", "tokens", y, [one for series in drawn for one in series])
    own = [
        chart(f"{rung.name}: {rung.plan.total_steps:,} steps", "tokens", y, series, xLog=False, zero=True)
        for rung, series in zip(rungs, drawn, strict=True)
    ]
    return [whole, *own]


def _series(rung: Rung, number: int) -> list[Series]:
    """The rate over tokens, and the marks of each phase on it."""
    recipe, total, peak = rung.loaded.recipe, rung.plan.total_steps, rung.lr or 1.0
    no_rows = np.zeros(0, dtype=np.int64)  # a rung's schedule counts steps
    plan = plan_steps(recipe.train.duration, no_rows, recipe.train.global_batch_size)
    schedule = build_schedule(recipe.schedule, plan, no_rows)

    def at(step: int) -> list[float]:
        return [float(step * rung.batch.tokens), schedule.factor(step) * peak]

    series: list[Series] = [{"name": rung.name, "color": number, "curve": [at(i) for i in _steps(schedule, total)]}]
    for phase in ("pre-decay", "post-decay"):
        dots = [at(mark.step) for mark in rung.marks if mark.phase == phase]
        if dots:
            hollow = {"hollow": True} if phase == "pre-decay" else {}
            series.append({"name": f"{rung.name}, {phase}", "color": number, "dots": dots, **hollow})
    return series


def _steps(schedule: Schedule, total: int) -> list[int]:
    """Steps of a curve from the first to the last: evenly apart on either axis, each turn, and the step after it."""
    even = [round(at) for at in (*np.linspace(1, total, PLACES), *np.geomspace(1, total, PLACES))]
    turns = (step for turn, _ in schedule.turns() for step in (turn, turn + 1))
    return sorted({step for step in (*even, *turns) if 1 <= step <= total})
