"""The optimizers against their formulas, their state as tensors, and the flag that leaves a step out."""

import math

import pytest
import torch
from torch import nn

from tuner.config.recipe import OptimizerSection
from tuner.train.optimizer import Updater, build_updater

SHAPES = {"embed.weight": (7, 4), "layer.weight": (6, 4), "layer.bias": (6,), "norm.weight": (4,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take(updater: Updater, own: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        updater.set_factor(1 / (step + 1))
        updater.step()
        updater.zero_grad()
        assert all(parameter.grad is None for parameter in own.values())


def section(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"lr": 0.1, "weight_decay": 0.3, **values})


def test_adamw_is_its_formula() -> None:
    own, expected = parameters(), {name: p.detach().clone().double() for name, p in parameters().items()}
    take(build_updater(section(), own), own, range(4))
    first, second = ({name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in range(2))
    for t in range(1, 5):
        lr = 0.1 / t
        for name, gradient in gradients(t - 1).items():
            g = gradient.double()
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            if len(SHAPES[name]) > 1:
                expected[name] *= 1 - lr * 0.3
            denominator = (second[name] / (1 - 0.95**t)).sqrt() + 1e-8
            expected[name] -= lr / (1 - 0.9**t) * first[name] / denominator
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_state_taken_over_goes_on_bit_for_bit() -> None:
    straight = parameters()
    take(build_updater(section(), straight), straight, range(6))
    own = parameters()
    before = build_updater(section(), own)
    empty = {name: tuple(tensor.shape) for name, tensor in before.state_tensors().items()}
    take(before, own, range(3))
    assert {name: tuple(tensor.shape) for name, tensor in before.state_tensors().items()} == empty
    after = build_updater(section(), own)
    for name, tensor in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[name])
    after.set_step_count(3)
    take(after, own, range(3, 6))
    for name, parameter in own.items():
        assert torch.equal(parameter, straight[name]), name


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_a_flag_on_the_device_leaves_a_step_out(bad: float) -> None:
    own, other = parameters(), parameters()
    flagged, plain = build_updater(section(), own), build_updater(section(), other)
    take(flagged, own, range(1))
    take(plain, other, range(1))
    for name, gradient in gradients(7).items():
        own[name].grad = gradient.clone()
        own[name].grad[0] = math.nan if bad else 0.5
        other[name].grad = own[name].grad
    assert flagged.takes_flag
    flagged.step(torch.tensor(bad))
    if not bad:
        plain.step()
    take(flagged, own, range(1, 3))
    take(plain, other, range(1, 3))
    for name, parameter in own.items():
        assert torch.equal(parameter, other[name]), name


def test_state_has_names() -> None:
    names = build_updater(section(), parameters()).state_tensors().keys()
    assert names == {f"optimizer/{moment}/{name}" for moment in ("exp_avg", "exp_avg_sq") for name in SHAPES}
