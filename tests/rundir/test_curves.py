"""Curves: columns of the metrics, thinned, drawn in the terminal and written as a page."""

import json
import re
from pathlib import Path

import pytest

from tests.browser import Browser, chromium
from tests.rundir import made
from tuner.errors import RecipeError
from tuner.rundir.curves import (
    MARK,
    SMOOTHED_POINTS,
    Chart,
    Curve,
    Points,
    charts,
    draw,
    number,
    page,
    thinned,
    write_page,
)
from tuner.rundir.record import read_run, summary


def points(values: list[float | None]) -> Points:
    steps = [float(i) for i in range(1, len(values) + 1)]
    return Points(steps, [s * 10 for s in steps], [s / 2 for s in steps], values)


def test_the_charts_of_two_runs(tmp_path: Path) -> None:
    lines = [made.eval_line(0, 3.0, a=2.5, b=3.5), made.step_line(1, extra=7), made.step_line(2, float("nan"))]
    runs = [read_run(made.run(tmp_path / "r", lines)), read_run(made.run(tmp_path / "s"))]
    found = {chart.key: chart for chart in charts(runs)}
    assert list(found) == ["loss", "eval", "lr", "grad_norm", "tok_per_s", "extra"]
    assert [(c.run, c.source, c.points.value) for c in found["eval"].curves] == [
        (0, "", [3.0]), (0, "a", [2.5]), (0, "b", [3.5]), (1, "", [3.0, 0.75]),
    ]  # fmt: skip
    waiting = read_run(made.run(tmp_path / "w", [made.step_line(1, data_wait=0.25), made.step_line(2, data_wait=0)]))
    share = {chart.key: chart for chart in charts([waiting])}["data_wait"].curves[0].points
    assert (share.step, share.value) == ([1, 2], [0.25, 0])
    loss = found["loss"].curves[0].points
    assert (loss.step, loss.tokens, loss.seconds, loss.value) == ([1, 2], [100, 200], [2.5, 3.0], [2.0, None])


def test_figures_of_layers_share_a_chart(tmp_path: Path) -> None:
    internals = [
        {"kind": "internals", "step": step, "tokens": 100 * step, "grad_rms/layers.0": 1.0, "grad_rms/layers.1": step}
        for step in (1, 2)
    ]
    found = {chart.key: chart for chart in charts([read_run(made.run(tmp_path / "r", internals))])}
    assert list(found) == ["grad_rms"] and found["grad_rms"].label == "RMS of gradients by layer"
    curves = [(curve.source, curve.points.value) for curve in found["grad_rms"].curves]
    assert curves == [("layers.0", [1.0, 1.0]), ("layers.1", [1.0, 2.0])]


def test_many_points_become_means_with_their_bounds() -> None:
    fewer = thinned(points([float(i) for i in range(1, 11)]), 5)
    assert (fewer.step, fewer.value) == ([2, 4, 6, 8, 10], [1.5, 3.5, 5.5, 7.5, 9.5])
    assert (fewer.low, fewer.high) == ([1, 3, 5, 7, 9], [2, 4, 6, 8, 10])
    assert fewer.tokens[-1], fewer.seconds[-1] == (100, 5)
    gap = thinned(points([None, None, 1.0, None]), 2)
    assert (gap.value, gap.low) == ([None, 1.0], [None, 1.0])
    short = points([1.0, 2.0])
    assert thinned(short, 2) is short


def test_a_chart_in_the_terminal() -> None:
    chart = Chart("loss", "training loss", [Curve(0, "", points([4.0, 3.0, 2.0, 1.0]))])
    lines = ["".join(text for text, _ in spans) for spans in draw(chart, 31, 4)]
    assert lines[0].strip() == "training loss"
    assert [line[:11] for line in lines[1:-1]] == ["        4 ┤", "          │", "        2 ┤", "        1 ┤"]
    assert lines[-1].endswith("step 4")
    assert {len(line) for line in lines[1:]} == {31}
    dots = [(x, y) for y, line in enumerate(lines[1:-1]) for x, cell in enumerate(line[11:]) if cell != " "]
    assert min(dots)[1] == 0
    assert max(dots)[1] == 3
    assert {ord(lines[1 + y][11 + x]) >> 8 for x, y in dots} == {0x28}


def test_runs_in_a_terminal_without_colour_have_letters() -> None:
    flat = [Curve(0, "", points([1.0, 1.0])), Curve(1, "", points([2.0, 2.0])), Curve(1, "part", points([9.0, 9.0]))]
    drawn = draw(Chart("eval", "evaluation loss", flat), 40, 5, letters=True)
    cells = [{text for text, run in spans if run is not None} for spans in drawn[1:-1]]
    assert (cells[0], cells[-1]) == ({"b"}, {"a"})
    assert "2" in drawn[1][0][0]  # not 9: single sources are left out


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [5.0] * 3, [None, 2.0]])
def test_charts_without_a_slope_are_drawn(values: list[float | None]) -> None:
    assert len(draw(Chart("lr", "learning rate", [Curve(0, "", points(values))]), 30, 4)) == 6


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.5, "0.5"), (1e-5, "1.00e-05"), (12345.6, "12,346"), (3.14159, "3.142"), (-2e9, "-2.00e+09")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
    assert len(text) <= 9


def test_the_page_holds_its_data_and_asks_for_nothing(tmp_path: Path) -> None:
    hostile = "seed: 1\noptimizer: {lr: 0.002}\ndata: {train: '</script><script>alert(1)</script>'}\n"
    lines = [made.eval_line(0, 3.0), made.step_line(1, float("inf"))]
    runs = [read_run(made.run(tmp_path / "r", lines)), read_run(made.run(tmp_path / "<b>", recipe=hostile))]
    text = page(runs, charts(runs), 0.5)
    assert text.startswith(MARK.decode())
    assert not re.findall(
        r"(?:src|href)=\"(?!data:)|url\((?!#)|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text
    )
    assert "default-src 'none'" in text
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    assert [run["name"] for run in data["runs"]] == ["r", "<b>"]
    assert data["runs"][0]["loss"] == "inf"
    assert data["runs"][0]["differs"] == {"optimizer.lr": "0.001", "data.train": ""}
    assert data["smoothing"] == 0.5
    assert data["charts"][0]["curves"][0]["points"]["value"] == [2.0, 1.0, 2 / 3, 0.5]


def test_labels_say_what_a_number_is(tmp_path: Path) -> None:
    lines = [made.step_line(step, mfu=0.5, mem_gib=1.5, data_wait=0.25) for step in (1, 2)]
    recipes = {"cpu": "train: {device: cpu}\n", "cuda": "train: {device: cuda}\nmethod: {kind: custom}\n"}
    runs = {name: read_run(made.run(tmp_path / name, lines, text)) for name, text in recipes.items()}
    cpu, cuda, both = (
        {chart.key: chart for chart in charts(some)} for some in ([runs["cpu"]], [runs["cuda"]], list(runs.values()))
    )
    assert cpu["mem_gib"].label == "peak memory of the process (RSS)" and "GPU" in cuda["mem_gib"].label
    assert (both["mem_gib"].label, both["mem_gib"].unit) == ("peak memory", "GiB")
    assert (cpu["loss"].unit, cuda["loss"].unit, both["loss"].unit) == ("nats per token", "", "")
    assert (cpu["mfu"].unit, cpu["mfu"].curves[0].points.value) == ("%", [0.5, 0.5])
    drawn = ["".join(text for text, _ in spans) for spans in draw(cpu["data_wait"], 40, 4)]
    assert "12.5% ┤" in drawn[-2] and "%" not in drawn[0]


@pytest.mark.parametrize(("steps", "smoothing"), [(SMOOTHED_POINTS - 1, 0.0), (SMOOTHED_POINTS, 0.8)])
def test_short_curves_end_at_their_last_value(tmp_path: Path, steps: int, smoothing: float) -> None:
    runs = [read_run(made.run(tmp_path / "r", [made.step_line(step) for step in range(1, steps + 1)]))]
    assert f'"smoothing":{smoothing}' in page(runs, charts(runs), None)


@pytest.mark.skipif(chromium() is None, reason="no Chromium on the path; set TUNER_TEST_CHROMIUM to one")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    lines = [made.step_line(step, 1 / step, data_wait=0.25) for step in range(1, 6)]
    launches = [made.launch("10:00:00", "10:01:00", 0, 3), made.launch("10:05:00", "10:06:00", 3, 5)]
    runs = [read_run(made.run(tmp_path / "r", lines, launches=launches))]
    target = tmp_path / "curves.html"
    write_page(target, runs, charts(runs), None)
    program = chromium()
    assert program is not None
    with Browser(program, tmp_path) as browser:
        browser.open(target)
        assert browser.run("document.documentElement.scrollWidth") <= 1280
        texts = browser.run("[...document.querySelectorAll('.plot text')].map(one => one.textContent)")
        assert {"step", "nats per token", "20 %"} <= set(texts), texts
        middle = "document.querySelectorAll('.plot text[text-anchor=middle]')"
        steps = browser.run(f"[...{middle}].map(one => one.textContent)")
        assert steps and all(text.isdecimal() for text in steps if text != "step")  # no half steps
        marks = browser.run("document.querySelectorAll('.resumed title').length")
        assert marks == len(charts(runs))
        assert "r was resumed here" in browser.run("document.querySelector('.resumed title').textContent")
        assert browser.said == []


def test_only_a_page_is_written_over(tmp_path: Path) -> None:
    runs = [read_run(made.run(tmp_path / "r"))]
    target = tmp_path / "curves.html"
    for _ in range(2):
        write_page(target, runs, charts(runs), 0.5)
    assert target.read_bytes().startswith(MARK)
    (tmp_path / "link.html").symlink_to(target)
    (tmp_path / "mine.html").write_text("<!doctype html> mine")
    for name in ("mine.html", "link.html", "r"):
        with pytest.raises(RecipeError) as error:
            write_page(tmp_path / name, runs, charts(runs), 0.5)
        assert "--output" in str(error.value.hint)
    assert (tmp_path / "mine.html").read_text() == "<!doctype html> mine"


def test_figures_of_a_method_stand_next_to_its_loss(tmp_path: Path) -> None:
    measured = made.eval_line(0, 0.6) | {"accuracy": 0.5, "accuracy/a": 0.25, "accuracy/b": 0.75, "margin": 0.1}
    lines = [measured, made.step_line(1, accuracy=0.75, margin=0.5, odds=2.0)]
    own, custom = (
        read_run(made.run(tmp_path / kind, lines, f"method: {{kind: {kind}}}\n")) for kind in ("dpo", "custom")
    )
    found = {chart.key: chart for chart in charts([own])}
    keys = ["loss", "eval", "accuracy", "eval accuracy", "margin", "eval margin", "lr", "grad_norm", "tok_per_s"]
    assert list(found) == [*keys, "odds"]
    assert (found["loss"].unit, found["eval"].unit, found["eval accuracy"].unit) == ("", "", "%")
    assert [curve.source for curve in found["eval accuracy"].curves] == ["", "a", "b"]
    theirs = {chart.key: chart for chart in charts([custom])}
    assert (theirs["loss"].unit, theirs["eval"].unit) == ("", "nats per token")
    assert (theirs["accuracy"].label, theirs["accuracy"].unit) == ("accuracy", "")
    assert summary(own)["eval_figures"] == {"accuracy": 0.5, "margin": 0.1}
