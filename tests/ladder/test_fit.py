"""The fit: known parameters come back, outliers weigh little, and what points cannot tell is said.

And the law: its derivatives, its form for the points that there are, and the number that it is known by.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ladder import made
from tuner.errors import DataError
from tuner.ladder import fit as fitting
from tuner.ladder.fit import form_of
from tuner.ladder.points import Point, Size, read_points

FEW = fitting.Settings(samples=40)
TRUTH = made.Truth()
LARGE = Size(13e9, 260e9)


@settings(max_examples=12, deadline=None)
@given(
    constant=st.floats(0.5, 2.5),
    terms=st.tuples(st.floats(0.15, 1.5), st.floats(0.15, 1.5)),
    exponents=st.tuples(st.floats(0.2, 0.7), st.floats(0.2, 0.7)),
)
def test_known_parameters_come_back(
    constant: float, terms: tuple[float, float], exponents: tuple[float, float]
) -> None:
    a, b = exponents
    truth = made.Truth(constant, terms[0] * 3e8**a, terms[1] * 1e10**b, a, b)
    fit = fitting.fit_law(made.ladder(truth), "loss", fitting.Settings(samples=1), fitting.NEEDED_SIZES)
    found = fit.form.natural(fit.parameters[None])[0]
    assert found[[0, 3, 4]] == pytest.approx([constant, a, b], rel=2e-3)
    assert fit.predict([LARGE])[0].value == pytest.approx(truth.loss(LARGE.parameters, LARGE.tokens), rel=1e-4)


def test_an_outlier_weighs_little() -> None:
    points = made.ladder(TRUTH, noise=0.001)
    points[9] = replace(points[9], figures={"loss": points[9].figures["loss"] * 1.3})
    fit = fitting.fit_law(points, "loss", FEW, fitting.NEEDED_SIZES)
    found = {one.name: one.value for one in fitting.parameters_of(fit)}
    assert found["E"].value == pytest.approx(TRUTH.constant, rel=0.1)
    assert fit.predict([LARGE])[0].value == pytest.approx(TRUTH.loss(LARGE.parameters, LARGE.tokens), rel=0.01)


def test_the_minimum_is_that_of_lbfgs() -> None:
    """An independent way: torch's L-BFGS in float64 from a part of the grid, by automatic derivatives."""
    points = made.ladder(TRUTH, noise=0.004, seed=3)
    form = fitting.form_of(points)
    design, logs = form.design([point.size for point in points]), np.log([point.figures["loss"] for point in points])
    curve = form.curve(design, logs)
    fit = fitting.fit_law(points, "loss", fitting.Settings(samples=1), fitting.NEEDED_SIZES)
    own = float(fitting.huber(curve.at(fit.parameters[None]).values - logs, fit.delta)[0])
    best = min(lbfgs(start, design, logs, fit.delta) for start in fitting.starts_of(form, logs)[::110])
    assert own <= best * (1 + 1e-6)


def lbfgs(start: np.ndarray, design: np.ndarray, logs: np.ndarray, delta: float) -> float:
    x, y, own = torch.tensor(design), torch.tensor(logs), torch.tensor(start, requires_grad=True)

    def loss() -> torch.Tensor:
        parts = torch.stack([own[0].expand(len(y)), own[1] - own[3] * x[:, 0], own[2] - own[4] * x[:, 1]])
        return torch.nn.functional.huber_loss(torch.logsumexp(parts, 0), y, delta=delta) * 1e6

    optimizer = torch.optim.LBFGS([own], max_iter=400, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimizer.step(closure)
    return float(loss().detach()) / 1e6


def test_no_step_makes_hubers_loss_larger() -> None:
    points = made.ladder(TRUTH, noise=0.01)
    form = fitting.form_of(points)
    logs = np.log([point.figures["loss"] for point in points])
    curve: fitting.LawCurve = form.curve(form.design([point.size for point in points]), logs)
    starts, before = fitting.starts_of(form, logs), np.inf
    for steps in (0, 3, 10, 40):
        now = fitting.fit_curves(curve, logs, starts, 1e-3, steps).loss
        assert (now <= before).all()
        before = now


def test_the_same_seed_gives_the_same_bits() -> None:
    points = made.ladder(TRUTH, noise=0.004)
    first, again = (fitting.fit_law(points, "loss", FEW, fitting.NEEDED_SIZES) for _ in range(2))
    other = fitting.fit_law(points, "loss", replace(FEW, seed=1), fitting.NEEDED_SIZES)
    assert first.predict([LARGE]) == again.predict([LARGE])
    assert (first.samples == again.samples).all()
    assert first.predict([LARGE])[0].value == other.predict([LARGE])[0].value
    assert first.predict([LARGE]) != other.predict([LARGE])


def test_published_points_on_a_line_identify_no_term_of_tokens() -> None:
    points = [point for point in read_points(made.CEREBRAS) if point.rung != "13B"]
    fit = fitting.fit_law(points, "loss", fitting.Settings(samples=100), fitting.NEEDED_SIZES)
    found = {one.name: one for one in fitting.parameters_of(fit)}
    assert {name: one.why for name, one in found.items() if name in "Bb"} == dict.fromkeys(
        "Bb", "every point has 20.1 tokens per parameter"
    )
    predicted = fit.predict([Size(13e9, 257.1e9)])[0]
    assert predicted.value == pytest.approx(1.572, rel=0.02)
    assert predicted.low <= 1.572 <= predicted.high


def test_an_exponent_is_not_invented_where_a_term_is_lost_in_noise() -> None:
    flat = made.Truth(2.5, 482.01, 1e-3, 0.3478, 0.3658)
    fit = fitting.fit_law(made.ladder(flat, noise=0.003), "loss", FEW, fitting.NEEDED_SIZES)
    found = {one.name: one for one in fitting.parameters_of(fit)}
    assert found["a"].why == ""
    assert "exponent" in found["b"].why
    assert found["B"].why == found["b"].why


def test_a_constant_is_not_invented_where_the_loss_falls_by_one_power() -> None:
    points = [
        Point(str(size), size, 20 * size * m, {"loss": 60 * size**-0.12 * m**-0.08 * math.exp(0.002 * (-1) ** i)})
        for size in made.SIZES for i, m in enumerate(made.MULTIPLES)
    ]  # fmt: skip
    found = {one.name: one for one in fitting.parameters_of(fitting.fit_law(points, "loss", FEW, fitting.NEEDED_SIZES))}
    assert found["E"].why.startswith("any E from 0 to ")


def test_intervals_widen_with_noise_and_distance() -> None:
    def width(noise: float, size: Size) -> float:
        value = fitting.fit_law(made.ladder(TRUTH, noise=noise), "loss", FEW, fitting.NEEDED_SIZES).predict([size])[0]
        return value.high - value.low

    near = Size(1.3e9, 26e9)
    assert width(0.001, LARGE) < width(0.005, LARGE)
    assert width(0.005, near) < width(0.005, LARGE)


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
