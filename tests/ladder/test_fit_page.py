"""The page of a fit, and the same as values for programs."""

import json
import re
from pathlib import Path

import pytest

from tests.browser import Browser, chromium
from tests.ladder import made
from tuner.errors import RecipeError
from tuner.ladder.fit import Settings
from tuner.ladder.fit_page import MARK, check_output, figures_of, fit_page, optimum, write_fit_page
from tuner.ladder.forecast import Forecast, ForecastQuestion, forecast
from tuner.ladder.points import Size, read_points

FEW = Settings(samples=100)
TRUTH = made.Truth()
SHARE_OF_DOTS = """(() => {
  const chart = DATA.charts[1];
  for (const series of chart.series) for (const place of series.curve ?? []) if (place.length > 2) place[3] *= 1e6;
  const { low, high } = extent(chart), dots = chart.series.flatMap(series => (series.dots ?? []).map(dot => dot[1]));
  return (Math.max(...dots) - Math.min(...dots)) / (high - low);
})()"""
"""How much of a chart's height the dots take where the interval of a law spans decades."""


@pytest.fixture(scope="module")
def full() -> Forecast:
    points = made.with_scores(made.ladder(TRUTH, noise=0.002), noise=0.005)
    return forecast(points, ForecastQuestion(FEW, rung="1.3B", scores=("task/acc",), chance=0.25))


@pytest.fixture(scope="module")
def on_line() -> Forecast:
    return forecast(read_points(made.CEREBRAS), ForecastQuestion(FEW, size=Size(30e9, 600e9)))


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_the_charts_are_those_that_the_points_allow(full: Forecast, on_line: Forecast) -> None:
    labels = [[chart["label"] for chart in data_of(fit_page("x", one))["charts"]] for one in (full, on_line)]  # type: ignore[attr-defined]
    assert labels[0] == [
        "Loss over tokens",
        "Loss over training FLOPs, and the law's optimum",
        "Residuals: measured over fitted, less one",
        "Each rung predicted from the others: predicted over measured, less one",
        "task/acc over the loss",
    ]
    assert labels[1] == ["Loss over parameters, 20.4 tokens per parameter", *labels[0][2:4]]


def test_values_for_programs_have_null_for_what_is_not_identified(on_line: Forecast) -> None:
    found = figures_of(on_line)
    assert found["parameters"]["b"] == {
        "value": None, "low": None, "high": None, "why_not": "every point has 20.4 tokens per parameter",
    }  # fmt: skip
    assert set(found["curve"]) == {"E", "A", "a"}
    target = found["target"]
    assert target["loss"]["low"] < target["loss"]["value"] < target["loss"]["high"]
    assert target["checked"] is None
    json.dumps(data_of(fit_page("x", on_line)), allow_nan=False)


def test_the_optimum_is_the_lowest_loss_for_its_flops(full: Forecast) -> None:
    best = optimum(full.fit, 1e21)
    assert best.flops == pytest.approx(1e21)
    sizes = [Size(best.parameters * factor, best.tokens / factor) for factor in (0.8, 1.0, 1.25)]
    less, lowest, more = (one.value for one in full.fit.band(sizes))
    assert lowest < min(less, more)


def test_only_a_page_of_a_fit_is_written_over(tmp_path: Path, on_line: Forecast) -> None:
    page = tmp_path / "fit.html"
    check_output(page)
    write_fit_page(page, "x", on_line)
    assert page.read_bytes().startswith(MARK)
    check_output(page)
    page.write_text("notes")
    with pytest.raises(RecipeError, match="holds something else than a fit"):
        check_output(page)
    with pytest.raises(RecipeError, match="is not a file"):
        check_output(tmp_path)


@pytest.mark.skipif(chromium() is None, reason="needs chromium")
def test_the_page_draws_every_chart(tmp_path: Path, full: Forecast, on_line: Forecast) -> None:
    program = chromium()
    assert program is not None
    for number, one in enumerate((full, on_line)):
        write_fit_page(tmp_path / f"{number}.html", "ladder <b>", one)
    with Browser(program, tmp_path) as browser:
        for number, one in enumerate((full, on_line)):
            browser.open(tmp_path / f"{number}.html", dark=number == 1)
            dots = browser.run(
                "[...document.querySelectorAll('section svg')].map(s => s.querySelectorAll('circle').length)"
            )
            assert len(dots) == len(data_of(fit_page("x", one))["charts"])  # type: ignore[arg-type]
            assert min(dots) > 3
            assert browser.run("document.title") == "ladder <b>"
            assert browser.run("document.documentElement.scrollWidth") <= 1280
            assert not browser.run("document.querySelector('main').innerText.includes('NaN')")
            if number == 0:
                assert browser.run(SHARE_OF_DOTS) > 0.1
        assert browser.said == []
