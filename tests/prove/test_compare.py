"""How far apart: floors for what is rounding alone, factors, and numbers that are not finite."""

import math

import pytest
import torch

from tuner.prove import compare


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
