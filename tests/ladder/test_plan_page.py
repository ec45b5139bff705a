"""The plan of a ladder as a page and as a picture: rates and marks over tokens."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.browser import Browser, chromium
from tests.ladder.ladders import ladder_tree, write_ladder_files
from tuner.config.load import load_recipe
from tuner.errors import RecipeError
from tuner.ladder.launch import PlannedRung
from tuner.ladder.plan_page import MARK, PLAN, charts_of, check_output, write_plan
from tuner.ladder.rungs import Rung, rungs_of
from tuner.train.plan import build_schedule, plan_steps


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rung, ...]:
    directory = tmp_path_factory.mktemp("ladder")
    write_ladder_files(directory)
    return rungs_of(load_recipe(ladder_tree(), cwd=directory))


def test_curves_are_those_that_are_trained(rungs: tuple[Rung, ...]) -> None:
    together, small, large = charts_of(rungs)
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
    check_output(path)
    write_plan(path, "ladder", [PlannedRung(rung) for rung in rungs])
    check_output(path)  # its own is written over
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
        check_output(tmp_path / name)


@pytest.mark.skipif(chromium() is None, reason="needs chromium")
def test_the_page_draws_every_rung(rungs: tuple[Rung, ...], tmp_path: Path) -> None:
    program = chromium()
    assert program is not None
    path = tmp_path / "plan.html"
    write_plan(path, "ladder <b>", [PlannedRung(rung) for rung in rungs])
    assert path.read_bytes().startswith(MARK)
    with Browser(program, tmp_path) as browser:
        browser.open(path, dark=False)
        counts = "[...document.querySelectorAll('section svg')].map(one => one.querySelectorAll('circle').length)"
        assert browser.run(counts) == [8, 4, 4]
        assert browser.run("document.querySelectorAll('#parameters td').length") == 2 * len(PLAN)
        assert browser.run("document.title") == "ladder <b>"
        assert not browser.run("document.querySelector('main').innerText.includes('NaN')")
        assert browser.said == []
