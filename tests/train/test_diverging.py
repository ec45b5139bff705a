"""The rule by which a layer that diverges is named."""

import pytest

from tuner.train.internals import FACTOR, LEAST, Divergence


def measured(*values: float | None, figure: str = "grad_rms") -> dict[str, float | None]:
    return {f"{figure}/layers.{i}": value for i, value in enumerate(values)} | {f"{figure}/embedding": 1.0}


def noted(rows: list[dict[str, float | None]]) -> list[str]:
    """What is named, measurement by measurement."""
    divergence = Divergence()
    return [",".join(f"{one.layer} {one.figure}" for one in divergence.note(row)) for row in rows]


def test_a_layer_that_leaves_the_others_is_named_once_until_it_is_calm() -> None:
    calm = [measured(1.0, 1.1, 0.9)] * LEAST
    loud = measured(1.0, 5.0, 0.9)
    found = noted([*calm, loud, loud, calm[0], loud])
    assert found == ["", "", "", "layers.1 grad_rms", "", "", "layers.1 grad_rms"]


@pytest.mark.parametrize(
    ("last", "named"),
    [
        (measured(FACTOR * 1.01, FACTOR * 1.02, FACTOR * 1.01), ""),  # as all of them grow
        (measured(FACTOR * 0.99, 1.0, 1.0), ""),
        (measured(2.0, 2.0, 2.0 * FACTOR), "layers.2 grad_rms"),
        (measured(1.0, None, 1.0), "layers.1 grad_rms"),
        (measured(None, None, None), ""),  # the guard's affair
        (measured(1.0, 1.0, 1.0, figure="dead_share"), ""),
        (measured(-1.0, -9.0, 1.0), "layers.1 grad_rms"),
    ],
)
def test_what_counts_as_leaving_the_others(last: dict[str, float | None], named: str) -> None:
    assert noted([*[measured(1.0, 1.0, 1.0)] * LEAST, last])[-1] == named


def test_outputs_of_later_layers_have_grown_with_it() -> None:
    figure = "activation_rms"
    rows = [measured(1.0, 1.0, 1.0, 1.0, 1.0, figure=figure)] * LEAST
    assert noted([*rows, measured(1.0, 1.0, 1.0, 9.0, 8.0, figure=figure)])[-1] == f"layers.3 {figure}"


def test_too_few_measurements_say_nothing() -> None:
    assert noted([measured(1.0, 1.0)] * (LEAST - 1) + [measured(1.0, 99.0)]) == [""] * LEAST


def test_what_was_always_zero_has_not_grown() -> None:
    assert noted([*[measured(0.0, 0.0)] * LEAST, measured(1e-4, 1e-4)])[-1] == ""


def test_the_only_layer_is_held_to_itself() -> None:
    assert noted([*[measured(1.0)] * LEAST, measured(FACTOR)])[-1] == "layers.0 grad_rms"


def test_the_sentence_names_layer_figure_and_growth() -> None:
    divergence = Divergence()
    for _ in range(LEAST):
        divergence.note(measured(0.5, 0.5))
    (growth,) = divergence.note(measured(0.5, 6.0))
    said = "layers.1 diverges: its grad_rms is 6, 12.0 times what it was; that of the other layers 1.0 times"
    assert str(growth) == said
