"""The page of a fit, and the same as values for programs; the plan of a ladder as a page and as a picture."""

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import Browser, chromium
from tests.ladder import made
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.ladder import plan_page
from tuner.ladder.fit import Settings
from tuner.ladder.fit_page import MARK, check_output, figures_of, fit_page, optimum, write_fit_page
from tuner.ladder.forecast import Forecast, ForecastQuestion, forecast
from tuner.ladder.launch import PlannedRung
from tuner.ladder.points import Size, read_points
from tuner.ladder.rungs import Rung, rungs_of
from tuner.train.plan import build_schedule, plan_steps

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


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rung, ...]:
    directory = tmp_path_factory.mktemp("ladder")
    made.write_ladder_files(directory)
    return rungs_of(load_recipe(made.ladder_tree(), cwd=directory))


def test_curves_are_those_that_are_trained(rungs: tuple[Rung, ...]) -> None:
    together, small, large = plan_page.charts_of(rungs)
    assert (together["xLog"], small["xLog"], large["label"]) == (True, False, "large: 12 steps")
    assert together["series"] == small["series"] + large["series"]
    curve, before, after = large["series"]
    plan = plan_steps(rungs[1].loaded.recipe.train.duration, (), 4)  # type: ignore[arg-type]
    schedule = build_schedule(rungs[1].loaded.recipe.schedule, plan, ())  # type: ignore[arg-type]
    assert curve["curve"] == [[256.0 * i, schedule.factor(i) * (rungs[1].lr or 0)] for i in range(1, 13)]
    assert before["hollow"] and [dot[0] / 256 for dot in before["dots"]] == [4, 10]
    assert [dot[0] / 256 for dot in after["dots"]] == [6, 12] and {dot[1] for dot in after["dots"]} == {0.0}


def test_a_picture_shows_every_rung(rungs: tuple[Rung, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    plan_page.check_output(path)
    plan_page.write_plan(path, "ladder", [PlannedRung(rung) for rung in rungs])
    plan_page.check_output(path)  # its own is written over
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    assert image.size == (1800, 858)
    below = image.crop((0, 458, 1800, 858))
    halves = [below.crop((0, 0, 900, 400)), below.crop((900, 0, 1800, 400))]
    seen = [{color: count for count, color in half.getcolors(1 << 20) or ()} for half in halves]
    blue, orange = (0x2F, 0x6F, 0xDE), (0xE0, 0x6C, 0x1F)
    assert [(one.get(blue, 0) > 30, one.get(orange, 0) > 30) for one in seen] == [(True, False), (False, True)]


@pytest.mark.parametrize(("name", "said"), [("plan.svg", "neither a page nor"), ("notes.png", "holds something")])
def test_nothing_else_is_written_over(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("notes")
    with pytest.raises(RecipeError, match=said):
        plan_page.check_output(tmp_path / name)


@pytest.mark.skipif(chromium() is None, reason="needs chromium")
def test_the_page_draws_every_rung(rungs: tuple[Rung, ...], tmp_path: Path) -> None:
    program = chromium()
    assert program is not None
    path = tmp_path / "plan.html"
    plan_page.write_plan(path, "ladder <b>", [PlannedRung(rung) for rung in rungs])
    assert path.read_bytes().startswith(plan_page.MARK)
    with Browser(program, tmp_path) as browser:
        browser.open(path, dark=False)
        counts = "[...document.querySelectorAll('section svg')].map(one => one.querySelectorAll('circle').length)"
        assert browser.run(counts) == [8, 4, 4]
        assert browser.run("document.querySelectorAll('#parameters td').length") == 2 * len(plan_page.PLAN)
        assert browser.run("document.title") == "ladder <b>"
        assert not browser.run("document.querySelector('main').innerText.includes('NaN')")
        assert browser.said == []
