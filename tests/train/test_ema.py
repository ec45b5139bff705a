"""The average of the weights: its arithmetic, what leaves it as it is, and its turn in the place of the weights."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fixtures import tables
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.config.load import load_recipe
from tuner.config.recipe import EmaSection
from tuner.errors import RecipeError
from tuner.runtime.dist import RankInfo
from tuner.setup.build import run_tensors
from tuner.train.ema import Ema, decay_of
from tuner.train.step import TrainState, optimizer_step, skip_step

TRAINED = [20, 12, 5, 31, 7, 9]
MADE = {"adapter": {"kind": "none"}, "ema": {"decay": 0.7}}


def named(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Averages by the names of their parameters."""
    return {name.removeprefix("ema/"): tensor for name, tensor in tensors.items()}


def _weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in state.parameters.items()}


def test_it_is_the_sum_that_the_decay_says(tmp_path: Path) -> None:
    """In float64 from the weights after each update; a step that is left out counts for nothing."""
    write_model(tmp_path)
    assembly = assembly_for(recipe_for(tmp_path, **MADE), TRAINED, RankInfo())
    state = assembly.train_state
    expected = {name: weight.double() for name, weight in _weights(state).items()}
    for step in range(5):
        if step == 2:
            skip_step(state)
            continue
        optimizer_step(state, step, assembly.batches.step(step), 1.0)
        for name, weight in _weights(state).items():
            expected[name] = 0.7 * expected[name] + 0.3 * weight.double()
    averages = named(state.tensors())
    assert averages.keys() == state.parameters.keys()
    for name, average in averages.items():
        torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-6)
        assert not torch.equal(average, state.parameters[name])
    assert {f"ema/{name}" for name in state.parameters} < run_tensors(state).keys()


def test_training_has_the_same_bits_with_it_and_an_update_left_out_leaves_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    states = []
    for sections in (MADE, {"adapter": {"kind": "none"}}):
        assembly = assembly_for(recipe_for(tmp_path, train={"nonfinite": {"skip": 3}}, **sections), TRAINED, RankInfo())
        for step in range(2):
            optimizer_step(assembly.train_state, step, assembly.batches.step(step), 1.0)
        states.append(assembly.train_state)
    averaging, plain = states
    ema = averaging.part(Ema)
    assert plain.part(Ema) is None and ema is not None
    for name, weight in _weights(plain).items():
        assert torch.equal(weight, averaging.parameters[name])
    before = {name: average.clone() for name, average in ema.tensors().items()}
    ema.after_update(torch.tensor(True))
    assert all(torch.equal(before[name], average) for name, average in ema.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_of_the_weights_and_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3).to(dtype)
    parameters = dict(module.named_parameters())
    ema = Ema(module, parameters, 0.5, "ema/", evaluated=True)
    for parameter in parameters.values():
        parameter.data += torch.randn_like(parameter)
    ema.after_update(torch.tensor(False))
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    averages = {name: average.clone() for name, average in named(ema.tensors()).items()}
    with pytest.raises(KeyError), ema.other_weights()["ema/"]:
        for name, parameter in parameters.items():
            assert torch.equal(parameter, averages[name].to(dtype))
        raise KeyError
    assert all(torch.equal(weights[name], parameter) for name, parameter in parameters.items())
    assert all(torch.equal(averages[name], average) for name, average in named(ema.tensors()).items())
    assert all(average.dtype == torch.float32 for average in ema.tensors().values())


def test_half_life() -> None:
    decay = decay_of(load("half_life", "50 steps"))
    assert decay is not None and decay**50 == pytest.approx(0.5) and Fraction(decay) < 1
    assert decay_of(load("decay", 0.999)) == 0.999
    assert decay_of(EmaSection()) is None


def load(key: str, value: Any) -> EmaSection:
    tree: dict[str, Any] = {"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "ema": {key: value}}
    return load_recipe(tree).recipe.ema


@pytest.mark.parametrize(("ema", "said"), tables.cases(__file__, "what_makes_no_sense_is_refused"))
def test_what_makes_no_sense_is_refused(ema: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "ema": ema})
    assert said in str(caught.value)
