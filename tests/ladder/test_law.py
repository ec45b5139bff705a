"""The law: its derivatives, its form for the points that there are, and the number that it is known by."""

import numpy as np
import pytest

from tests.ladder import made
from tuner.errors import DataError
from tuner.ladder.fit import form_of
from tuner.ladder.points import Point, Size

TRUTH = made.Truth()


def test_derivatives_are_those_of_differences() -> None:
    points = made.ladder(TRUTH)
    form, logs = form_of(points), np.log([point.figures["loss"] for point in points])
    curve = form.curve(form.design([point.size for point in points]), logs)
    made.require_derivatives(curve, [0.4, -0.5, -1.0, 0.3, 0.5])


def test_natural_parameters_give_the_same_losses() -> None:
    points = made.ladder(TRUTH)
    form = form_of(points)
    at = np.array([[0.4, -0.5, -1.0, 0.3, 0.5]])
    truth = made.Truth(*(float(value) for value in form.natural(at)[0]))
    size = Size(1e9, 3e10)
    assert np.exp(form.logs(at, [size])[0, 0]) == pytest.approx(truth.loss(1e9, 3e10), rel=1e-12)


def test_tokens_in_proportion_to_parameters_leave_one_term_on_their_line() -> None:
    form = form_of(made.ladder(TRUTH, multiples=(1.0,)))
    assert (form.axes, form.text) == (("parameters",), "L = E + A/N^a")
    assert form.line is not None
    assert form.line.words() == "20 tokens per parameter"
    assert form.is_on_line(Size(1e10, 2e11))
    assert not form.is_on_line(Size(1e10, 4e11))


def test_one_size_leaves_the_term_of_tokens() -> None:
    form = form_of(made.ladder(TRUTH, sizes=(190e6,), multiples=(0.5, 1, 2, 4, 8)))
    assert (form.axes, form.text) == (("tokens",), "L = E + B/D^b")
    assert form.line is not None
    assert form.line.words() == "190M parameters"
    assert form.is_on_line(Size(190e6, 1e12))
    assert not form.is_on_line(Size(370e6, 1e12))


def test_one_number_of_tokens_is_a_line_too() -> None:
    points = [Point("", size, 1e10, {"loss": TRUTH.loss(size, 1e10)}) for size in made.SIZES]
    form = form_of(points)
    assert form.line is not None
    assert form.line.words() == "10B tokens"
    assert form.is_on_line(Size(1e12, 1e10))
    assert not form.is_on_line(Size(1e12, 1.3e10))


@pytest.mark.parametrize(
    ("sizes", "multiples", "message"),
    [
        ((), (), "there are no points"),
        ((1e8, 2e8, 4e8), made.MULTIPLES, "3 sizes of model"),
        ((1e8, 1.001e8, 1.002e8, 1.003e8), (1.0,), "1 size of model"),
        ((1e8,), (1.0, 2.0, 4.0), "1 size of model"),
    ],
)
def test_too_few_sizes_are_refused(sizes: tuple[float, ...], multiples: tuple[float, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        form_of(made.ladder(TRUTH, sizes=sizes, multiples=multiples))


def test_as_many_points_as_parameters_are_refused() -> None:
    points = [
        Point("", size, tokens, {"loss": 3.0}) for size, tokens in ((1e8, 1e9), (2e8, 8e9), (4e8, 1e9), (8e8, 8e9))
    ]
    with pytest.raises(DataError, match="4 points, and L = E .* has 5 parameters: a fit needs at least 6"):
        form_of(points)
