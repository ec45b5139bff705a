"""A fit as plain values for programs, and as one HTML file that needs nothing else."""

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from tuner.ladder.charts import Chart, Series, chart
from tuner.ladder.fit import Estimate, LawFit, LawForm, Parameter, parameters_of
from tuner.ladder.forecast import Forecast, LadderHeldOut, ScoreFit, sigmoid_parameters
from tuner.ladder.points import Along, Axis, Point, Size, by_rung, short
from tuner.rundir.curves import filled, require_own
from tuner.runtime.files import write_atomic

PAGE = "fit.html"
MARK = b"<!doctype html><!-- tuner ladder fit -->"
"""How every page begins: only such a file is written over."""
_TEMPLATE = Path(__file__).with_name("fit.html")


def check_output(path: Path) -> None:
    """Raise RecipeError where the page would overwrite something else."""
    require_own(path, MARK, "a fit")


def write_fit_page(path: Path, title: str, found: Forecast) -> None:
    """Write the page to a path that `check_output` looked at. Raises MachineError."""
    write_atomic(path, fit_page(title, found).encode())


def fit_page(title: str, found: Forecast) -> str:
    """The page's text."""
    fit = found.fit
    words = [fit.form.text, f"{len(fit.points)} points of {len(by_rung(fit.points))} rungs", fit.figure]
    data = {
        "title": title, "subtitle": " · ".join(words), "figures": figures_of(found), "charts": charts_of(found),
        "rungs": list(by_rung(fit.points)), "notes": found.notes,
    }
    return filled(_TEMPLATE, to_jsonable_python(data, inf_nan_mode="null"))  # JSON has no infinity and no NaN


def figures_of(found: Forecast) -> dict[str, Any]:
    """A forecast as JSON values; a parameter that the points do not identify has no value, and says why."""
    fit = found.fit
    return {
        "law": fit.form.text, "figure": fit.figure, "points": len(fit.points), "rungs": len(by_rung(fit.points)),
        "level": fit.settings.level, "seed": fit.settings.seed, "samples": fit.settings.samples,
        "noise_scale": fit.noise.scale,
        "parameters": {one.name: _parameter(one) for one in parameters_of(fit)},
        "curve": dict(zip(fit.form.names, map(float, fit.form.natural(fit.parameters[None])[0]), strict=True)),
        "left_out": [_held_out(one) for one in found.left_out],
        "target": None if found.target is None or found.loss is None else _target(found, found.target, found.loss),
        "scores": {
            one.figure: {"parameters": {each.name: _parameter(each) for each in sigmoid_parameters(one)}}
            for one in found.scores
        },
    }  # fmt: skip


def _target(found: Forecast, size: Size, loss: Estimate) -> dict[str, Any]:
    checked = None if found.checked is None else _held_out(found.checked)
    scores = {
        name: {**asdict(value), "measured": found.measured_scores.get(name)}
        for name, value in found.predicted_scores.items()
    }
    return {
        "parameters": size.parameters, "tokens": size.tokens, "flops": size.flops,
        "loss": asdict(loss), "checked": checked, "scores": scores,
    }  # fmt: skip


def _held_out(one: LadderHeldOut) -> dict[str, Any]:
    return {
        "rung": one.rung, "parameters": one.size.parameters, "tokens": one.size.tokens, "measured": one.measured,
        "predicted": asdict(one.predicted), "error": one.error, "is_covered": is_covered(one),
    }  # fmt: skip


def is_covered(one: LadderHeldOut) -> bool:
    """Whether the interval of the prediction has what was measured."""
    return one.predicted.low <= one.measured <= one.predicted.high


def _parameter(one: Parameter) -> dict[str, Any]:
    """A parameter; one that is not identified has null for its value."""
    if one.why:
        return {"value": None, "low": None, "high": None, "why_not": one.why}
    return {**asdict(one.value), "why_not": None}


def shown_parameter(name: str, value: float) -> str:
    """A parameter in few figures; factors are as large as powers of N and D are."""
    return short(value) if name in ("A", "B") and value >= 1e4 else f"{value:.4g}"


PLACES = 60
"""Values of a drawn curve."""
MOST_RUNGS = 12
"""Rungs that have a curve each; of more, as of others' sweeps, only the points are drawn."""
TARGET = "target"


def charts_of(found: Forecast) -> list[Chart]:
    """The charts of a forecast, in the order in which they are read."""
    fit = found.fit
    axis: Axis = "tokens" if "tokens" in fit.form.axes else "parameters"
    drawn = [_losses(found, axis), _flops(found)] if fit.form.line is None else [_along_line(found)]
    drawn.append(_residuals(fit))
    if found.left_out:
        drawn.append(_left_out(found))
    return [*drawn, *(_score(found, score) for score in found.scores)]


def _losses(found: Forecast, axis: Axis) -> Chart:
    """The loss over tokens, a curve for each size."""
    fit, rungs = found.fit, by_rung(found.fit.points)
    series = []
    for number, (name, points) in enumerate(rungs.items()):
        if len(rungs) <= MOST_RUNGS:
            sizes = [Size(points[-1].parameters, tokens) for tokens in _spread([point.tokens for point in points])]
            series.append(_curve(name, number, sizes, fit, axis, is_bare=True))
        series.append(_dots(name, number, points, fit.figure, axis))
    if found.target is not None:
        most = max(point.tokens for point in fit.points)
        reach = [min(found.target.tokens, most) / 4, found.target.tokens]
        sizes = [Size(found.target.parameters, tokens) for tokens in _spread(reach)]
        series += [_curve(TARGET, -1, sizes, fit, axis), *_target_series(found, axis)]
    return chart("Loss over tokens", axis, fit.figure, series)


def _flops(found: Forecast) -> Chart:
    """The loss over training FLOPs, with the lowest that the law expects of each."""
    fit = found.fit
    places = [point.size.flops for point in fit.points] + ([found.target.flops] if found.target else [])
    best = [optimum(fit, flops) for flops in _spread(places)]
    frontier = _curve("compute-optimal", -2, best, fit, "flops")
    series = [frontier, *_every_dot(fit, "flops"), *_target_series(found, "flops")]
    return chart("Loss over training FLOPs, and the law's optimum", "FLOPs (6 N D)", fit.figure, series)


def _along_line(found: Forecast) -> Chart:
    """The loss over the one axis that the points have."""
    fit = found.fit
    axis = fit.form.axes[0]
    counts = [point.size.along(axis) for point in fit.points] + ([found.target.along(axis)] if found.target else [])
    sizes = [on_line(fit.form, count) for count in _spread(counts)]
    assert fit.form.line is not None
    series = [_curve("law", -2, sizes, fit, axis), *_every_dot(fit, axis), *_target_series(found, axis)]
    return chart(f"Loss over {axis}, {fit.form.line.words()}", axis, fit.figure, series)


def _residuals(fit: LawFit) -> Chart:
    """Measured over fitted, less one."""
    over: dict[str, list[list[float]]] = {name: [] for name in by_rung(fit.points)}
    for point, residual in zip(fit.points, np.expm1(fit.residuals), strict=True):
        over[point.rung].append([point.tokens, float(residual)])
    series = [{"name": name, "color": number, "dots": dots} for number, (name, dots) in enumerate(over.items())]
    return chart("Residuals: measured over fitted, less one", "tokens", "residual", series, unit="%", zero=True)


def _left_out(found: Forecast) -> Chart:
    """The errors on rungs that were left out, with their intervals."""
    rungs = list(by_rung(found.fit.points))
    series = [_error(one, rungs.index(one.rung)) for one in found.left_out]
    if found.checked is not None:
        series.append({**_error(found.checked, -1), "name": f"{found.checked.rung}, {TARGET}"})
    return chart(
        "Each rung predicted from the others: predicted over measured, less one", "parameters", "error", series,
        unit="%", zero=True,
    )  # fmt: skip


def _error(one: LadderHeldOut, number: int) -> Series:
    ends = [value / one.measured - 1 for value in (one.predicted.value, one.predicted.low, one.predicted.high)]
    return {"name": one.rung, "color": number, "dots": [[one.size.parameters, *ends]]}


def _score(found: Forecast, score: ScoreFit) -> Chart:
    """A score over the loss."""
    loss = found.fit.figure
    losses = [point.figures[loss] for point in score.points]
    ends = [*losses, *([found.loss.value] if found.loss else [])]
    places = np.linspace(min(ends) - 0.05 * np.ptp(ends), max(ends) + 0.05 * np.ptp(ends), PLACES)
    band = [[float(x), *astuple(y)] for x, y in zip(places, score.band(places), strict=True)]
    series: list[Series] = [{"name": "sigmoid", "color": -2, "curve": band}]
    for number, (name, points) in enumerate(by_rung(score.points).items()):
        dots = [[point.figures[loss], point.figures[score.figure]] for point in points]
        series.append({"name": name, "color": number, "dots": dots})
    predicted, measured = found.predicted_scores.get(score.figure), found.measured_scores.get(score.figure)
    if predicted is not None and found.loss is not None:
        known = None if measured is None or found.checked is None else [found.checked.measured, measured]
        series += _target_dots([found.loss.value, *astuple(predicted)], known)
    return chart(f"{score.figure} over the loss", loss, score.figure, series, xLog=False)


def _target_series(found: Forecast, axis: Along) -> list[Series]:
    """The target's prediction with its interval, and what was measured there."""
    if found.target is None or found.loss is None:
        return []
    place = found.target.along(axis)
    known = None if found.checked is None else [place, found.checked.measured]
    return _target_dots([place, *astuple(found.loss)], known)


def _target_dots(predicted: list[float], measured: list[float] | None) -> list[Series]:
    series = {"name": TARGET, "color": -1, "dots": [predicted]}
    known = {"name": f"{TARGET}, measured", "color": -1, "hollow": True, "dots": [measured]}
    return [series] if measured is None else [series, known]


def _curve(name: str, number: int, sizes: Sequence[Size], fit: LawFit, axis: Along, is_bare: bool = False) -> Series:
    """The law at some sizes; a bare curve has no band."""
    values = [[value.value] if is_bare else astuple(value) for value in fit.band(sizes)]
    curve = [[size.along(axis), *value] for size, value in zip(sizes, values, strict=True)]
    return {"name": name, "color": number, "curve": curve}


def _every_dot(fit: LawFit, axis: Along) -> list[Series]:
    rungs = by_rung(fit.points)
    return [_dots(name, number, points, fit.figure, axis) for number, (name, points) in enumerate(rungs.items())]


def _dots(name: str, number: int, points: Sequence[Point], figure: str, axis: Along) -> Series:
    dots = [[point.size.along(axis), point.figures[figure]] for point in points]
    return {"name": name, "color": number, "dots": dots}


def _spread(counts: Sequence[float]) -> list[float]:
    """Places for a curve, evenly on a logarithmic axis, a little beyond the counts."""
    low, high = math.log(min(counts)) - 0.1, math.log(max(counts)) + 0.1
    return [math.exp(low + (high - low) * i / (PLACES - 1)) for i in range(PLACES)]


def on_line(form: LawForm, count: float) -> Size:
    """The size with so many of the law's one axis on its line."""
    assert form.line is not None
    other = math.exp(form.line.offset + form.line.slope * math.log(count))
    return Size(count, other) if form.axes[0] == "parameters" else Size(other, count)


def optimum(fit: LawFit, flops: float) -> Size:
    """The size with the lowest loss for so many training FLOPs, 6 N D.

    Where E + A/N^a + B/D^b is least: a A/N^a = b B/D^b, so N = ((a A)/(b B))^(1/(a+b)) (C/6)^(b/(a+b)).
    """
    _, first, second, a, b = map(float, fit.form.natural(fit.parameters[None])[0])
    parameters = math.exp((math.log(a * first) - math.log(b * second) + b * math.log(flops / 6)) / (a + b))
    return Size(parameters, flops / 6 / parameters)
