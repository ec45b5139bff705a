"""Points from a CSV, of this tool or another."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tests.ladder import made
from tuner.errors import DataError, RecipeError, TunerError
from tuner.ladder.points import Point, by_rung, parse_points, points_of, read_points, short, with_figure
from tuner.ladder.record import Mark, marks_csv, with_prefix

LADDER = """rung,parameters,total_parameters,multiple,phase,step,tokens,loss,a/acc
190M,190354176,2e8,0.5,pre-decay,10,1000000000,3.1,0.3
190M,190354176,2e8,0.5,post-decay,12,1200000000,3.0,
"""


def test_the_csv_of_a_ladder() -> None:
    assert parse_points(LADDER, "x.csv") == [
        Point("190M", 190354176.0, 1e9, {"loss": 3.1, "a/acc": 0.3}, is_decayed=False),
        Point("190M", 190354176.0, 1.2e9, {"loss": 3.0}),
    ]


def test_the_marks_of_a_ladder_are_the_points_of_their_csv() -> None:
    marks = [
        Mark("1M", 1_000_000, 1_100_000, 0.0, "initial", 0, 0, 11.0),
        Mark("1M", 1_000_000, 1_100_000, 0.5, "pre-decay", 9, 9000, None, {"perplexity": 9.0}),
        Mark("1M", 1_000_000, 1_100_000, 0.5, "post-decay", 10, 10_000, 3.25, {"a/acc": 0.5, "perplexity": 8.0}),
    ]
    points = points_of(marks)
    assert [set(mark.figures) for mark in with_prefix(marks, "a/")] == [set(), set(), {"a/acc"}]
    assert points == parse_points(marks_csv(marks), "x.csv")
    assert [point.is_decayed for point in points] == [False, True]


def test_the_csv_of_another_tool() -> None:
    text = "Training Tokens,Model Size,note,loss,bpb\n3.8B, 190M ,fine,3.5,\n\n7.6B,190M,,nan,0.9\n1e10,380M,,3.2,0.8\n"
    points = parse_points(text, "x.csv")
    assert points == [
        Point("190M", 190e6, 3.8e9, {"loss": 3.5}),
        Point("190M", 190e6, 7.6e9, {"bpb": 0.9}),
        Point("380M", 380e6, 1e10, {"loss": 3.2, "bpb": 0.8}),
    ]
    assert [point.rung for point in with_figure(points, "loss")] == ["190M", "380M"]
    assert {name: len(own) for name, own in by_rung(points).items()} == {"190M": 2, "380M": 1}


@pytest.mark.parametrize(("text", "message"), cases(__file__, "what_is_wrong_is_named_with_its_line"))
def test_what_is_wrong_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_points(text, "x.csv")


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        read_points(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        read_points(tmp_path / "x.csv")
    with pytest.raises(DataError):
        read_points(tmp_path)


def test_a_figure_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match="no point has a figure los") as caught:
        with_figure(read_points(made.CEREBRAS), "los")
    assert caught.value.hint == "there are: loss, average, hellaswag"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_any_text_gives_points_or_an_error_for_people(text: str) -> None:
    for body in (text, f"parameters,tokens,loss\n{text}"):
        try:
            parse_points(body, "x.csv")
        except TunerError as error:
            assert error.message


@pytest.mark.parametrize(
    ("count", "text"),
    [(190e6, "190M"), (190354176, "190.4M"), (1e9, "1B"), (999999999, "1B"), (12, "12"), (5e12, "5T")],
)
def test_short(count: float, text: str) -> None:
    assert short(count) == text
