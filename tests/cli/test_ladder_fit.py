"""`tuner ladder fit` by its real command lines: what is printed, where, and with which code."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures import commands
from tests.fixtures.commands import document
from tests.fixtures.tables import cases
from tests.ladder import made
from tests.rundir import made as run_made
from tuner.ladder.record import LadderRecord, RungRecord, write_ladder
from tuner.ladder.rules import PlannedMark


def fit(place: Path, *words: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.tuner("ladder", "fit", *words, cwd=place, stdin=stdin, code=code, COLUMNS="120", NO_COLOR="1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with published points."""
    shutil.copy(made.CEREBRAS, tmp_path / "points.csv")
    return tmp_path


def test_a_rung_predicted_from_the_others(place: Path) -> None:
    done = fit(place, "points.csv", "--target", "13B", "--score", "average", "--samples", "200")
    assert done.stdout == f"{place / 'fit.html'}\n"
    assert (place / "fit.html").is_file()
    assert "law       L = E + A/N^a · 6 points of 6 rungs" in done.stderr
    assert "not identified: every point has 20.1 tokens per parameter" in done.stderr
    assert "13B parameters after 257.1B tokens: loss 1.6" in done.stderr
    assert "inside the interval" in done.stderr


def test_the_document_has_every_figure(place: Path) -> None:
    found = document(fit(place, "points.csv", "--target", "30B", "--tokens", "601B", "--samples", "100", "--json"))
    figures = found["artifacts"]["fit"]
    assert found["metrics"] == {"points": 7, "rungs": 7}
    assert figures["parameters"]["B"]["value"] is None
    assert [one["rung"] for one in figures["left_out"]][-1] == "13B"
    assert (figures["target"]["parameters"], figures["target"]["tokens"]) == (30e9, 601e9)
    assert figures["target"]["loss"]["low"] < figures["target"]["loss"]["value"] < figures["left_out"][-1]["measured"]


def test_points_from_the_command_before(place: Path) -> None:
    done = fit(place, "-", "--samples", "100", "--output", "out.html", stdin=str(place / "points.csv"))
    assert done.stdout == f"{place / 'out.html'}\n"


def test_a_ladder_predicts_a_rung_that_was_only_planned(tmp_path: Path) -> None:
    truth, rungs = made.Truth(), []
    for number in range(1, 6):
        size = 10**6 * 3**number
        marks = (
            PlannedMark(1.0, "pre-decay", size // 6, size // 6 * 100),
            PlannedMark(1.0, "post-decay", size // 5, size // 5 * 100),
            PlannedMark(4.0, "post-decay", size, size * 100),
        )
        rungs.append(RungRecord(f"r{number}", size, size + 1, 100, None, size, marks))
        if number < 5:
            losses = [truth.loss(size, mark.tokens) + 0.1 * (mark.phase == "pre-decay") for mark in marks]
            lines = [
                line
                for mark, loss in zip(marks, losses, strict=True)
                for line in (run_made.step_line(mark.step, loss), run_made.eval_line(mark.step, loss))
            ]
            run_made.run(tmp_path / "runs" / "l" / f"r{number}", lines)
    write_ladder(LadderRecord(tmp_path / "runs" / "l", "l", tuple(rungs)))
    found = document(fit(tmp_path, "runs/l", "--target", "r5", "--samples", "100", "--json"))
    figures = found["artifacts"]["fit"]
    assert found["artifacts"]["path"] == str(tmp_path / "runs" / "l" / "fit.html")
    assert (figures["points"], figures["rungs"]) == (8, 4)
    assert figures["target"]["tokens"] == rungs[-1].marks[-1].tokens
    assert figures["target"]["loss"]["value"] == pytest.approx(truth.loss(243e6, 243e8), rel=1e-3)
    assert found["warnings"] == ["4 points before the decay of the learning rate are not fitted by the law"]


@pytest.mark.parametrize(("words", "code", "message"), cases(__file__, "what_is_refused"))
def test_what_is_refused(place: Path, words: list[str], code: int, message: str) -> None:
    lines = made.CEREBRAS.read_text().splitlines(keepends=True)
    (place / "few.csv").write_text("".join(lines[:3]))
    done = fit(place, *words, code=code)
    assert (done.stdout, message in done.stderr) == ("", True), done.stderr
    assert not (place / "fit.html").exists()
