"""How far apart: floors for what is rounding alone, factors, and numbers that are not finite.

And where a trace parts from that of one process: rows in micro-batches, shares of rows, outputs before gradients.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tuner.prove import compare
from tuner.prove.compare import ModuleTrace, first_place, traced, write_trace
from tuner.runtime import phase


def test_differences_are_relative_and_floored() -> None:
    one = torch.tensor([3.0, 4.0])
    assert compare.apart(one, one) == 0.0
    assert compare.apart(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert compare.apart(one + torch.tensor([0.0, 0.5]), one, floor=50.0) == pytest.approx(0.01)
    assert compare.apart(torch.tensor([math.nan, 4.0]), one) == math.inf
    assert compare.apart(torch.zeros(2), torch.zeros(2)) == 0.0


def test_what_rounding_moves_may_be_off_by_all_steps_and_no_further() -> None:
    wanted, gradient = torch.zeros(4), torch.tensor([1e-9, 1e-9, 0.5, 0.0])
    found = torch.tensor([0.01, 0.05, 0.01, 0.01])
    near = compare.without_rounding(found, wanted, gradient, norm=1.0, way=0.02)
    assert near.tolist() == pytest.approx([0.0, 0.03, 0.01, 0.01])


def test_the_factor_is_said_where_it_is_one() -> None:
    wanted = torch.arange(1.0, 7.0).view(2, 3)
    assert compare.times(2 * wanted, wanted) == ", 2 times it"
    others = [(wanted.flip(0), wanted), (wanted, torch.zeros(2, 3)), (wanted / 0, wanted)]
    assert [compare.times(*pair) for pair in others] == [""] * 3


def test_the_first_step_that_is_off_is_named() -> None:
    assert compare.furthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert compare.furthest([math.nan], [1.0]) == math.inf
    said = compare.first_step("loss", [1.0, 3.0, 9.0], [1.0, 2.0, 3.0], compare.LIMITS["loss"])
    assert said == "loss of step 2: 3, 2 in one process, 1.5 times it"
    assert compare.first_step("loss", [1.0], [1.0], compare.LIMITS["loss"]) == ""


def test_limits_and_what_is_exact() -> None:
    right = {name: limit for name, limit in compare.LIMITS.items()} | dict.fromkeys(compare.EXACT, 0.0)
    assert compare.unequal(right) == []
    for name in right:
        assert compare.unequal(right | {name: right[name] * 1.01 + 1e-30}) == [name]
        assert compare.unequal(right | {name: math.nan}) == [name]
    assert compare.LayoutProof("tp2", 2, "unequal", {"loss": math.inf}, "x").as_json()["loss"] is None


LENGTHS = (5, 4, 7, 3)


class Model(nn.Module):
    """Two layers over ``[1, T, 4]``, the second of which may be changed."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.after = nn.Linear(4, 4), nn.Linear(4, 4), after

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Both, one after the other."""
        return self.second(self.after(self.first(rows)))


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, 4, generator=generator) for length in LENGTHS]


def trace_of(model: Model, micro: list[torch.Tensor], scale: float = 1.0) -> ModuleTrace:
    with traced(model) as trace:
        for batch in micro:
            phase.enter_part(1, "forward")
            loss = scale * model(batch).square().sum()
            phase.enter_part(1, "backward")
            with torch.enable_grad():
                model(batch)  # computed again: no part of the trace
            loss.backward()
    return trace


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trace") / "plain"
    write_trace(trace_of(Model(), rows()), place)
    return place


MICRO = [range(2), range(2, 4)]


def batches() -> list[torch.Tensor]:
    return [torch.cat([rows()[row] for row in some], 1) for some in MICRO]


def test_the_same_model_is_nowhere_apart(directory: Path) -> None:
    trace = trace_of(Model(), batches())
    assert [len(tensors) for tensors in trace.outputs.values()] == [2, 2]
    assert first_place(trace, directory, MICRO, (0, 1), 0) is None


def test_a_share_of_a_row_is_compared_with_its_positions(directory: Path) -> None:
    whole = batches()
    for number in range(2):
        shares = [torch.nn.functional.pad(one, (0, 0, 0, one.shape[1] % 2)).chunk(2, 1)[number] for one in whole]
        assert first_place(trace_of(Model(), shares), directory, MICRO, (number, 2), number) is None
    wrong = first_place(trace_of(Model(), shares), directory, MICRO, (0, 2), 1)
    assert wrong is not None and str(wrong).startswith("output of first: ") and wrong.rank == 1


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"after": lambda hidden: hidden * 1.001}, "output of second: "),
    ({"scale": 2.0}, "gradient of the output of second, where the output layer and the loss hand it over: "),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_the_first_module_that_differs_is_named(change: dict[str, Any], words: str, directory: Path) -> None:
    after = change.get("after", lambda hidden: hidden)
    trace = trace_of(Model(after), batches(), change.get("scale", 1.0))
    assert str(first_place(trace, directory, MICRO, (0, 1), 0)).startswith(words)


def test_a_gradient_that_is_lost_on_its_way_is_named_where_it_is_missed(directory: Path) -> None:
    class Halved(torch.autograd.Function):
        """The same forward, half of the gradient."""

        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient / 2

    found = first_place(trace_of(Model(Halved.apply), batches()), directory, MICRO, (0, 1), 0)
    assert str(found).startswith("gradient of the output of first: 5.0e-01 apart")
