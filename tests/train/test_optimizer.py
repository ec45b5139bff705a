"""The optimizers against their formulas and other implementations, their state as tensors, and the flag."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from transformers.optimization import Adafactor

from tests.fixtures import tables
from tuner.config.optimizers import Optimizer
from tuner.errors import RecipeError
from tuner.train.optimizer import OptimizerSet, build_optimizer, is_matrix

SHAPES = {
    "embed.weight": (7, 4), "layer.weight": (6, 4), "down.weight": (4, 6), "layer.bias": (6,), "norm.weight": (4,),
    "experts.up": (3, 5, 4),
}
OUTER = frozenset({"embed.weight"})
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {}, "sgd": {}, "sgd-nesterov": {"kind": "sgd", "nesterov": True},
    "sgd-plain": {"kind": "sgd", "momentum": 0}, "adafactor": {},
    "adafactor-scaled": {"kind": "adafactor", "scale_parameter": True}, "muon": {"adamw_lr": 0.01},
}
SECTIONS: TypeAdapter[Any] = TypeAdapter(Optimizer)


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def built(own: dict[str, nn.Parameter], kind: str, **values: Any) -> OptimizerSet:
    section = {"kind": kind, "lr": 0.1, "weight_decay": 0.3, **KINDS.get(kind, {}), **values}
    return build_optimizer(SECTIONS.validate_python(section), own, OUTER)


def take(updater: OptimizerSet, own: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        updater.set_factor(1 / (step + 1))
        updater.step()
        updater.zero_grad()
        assert all(parameter.grad is None for parameter in own.values())


def assert_near(own: dict[str, nn.Parameter], expected: dict[str, Any], rtol: float = 1e-5) -> None:
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name].detach().double(), rtol=rtol, atol=1e-6)


def decay(name: str) -> float:
    return 0.3 if name in {"embed.weight", "layer.weight", "down.weight", "experts.up"} else 0.0


def test_adamw_is_its_formula() -> None:
    own, expected = parameters(), {name: p.detach().clone().double() for name, p in parameters().items()}
    take(built(own, "adamw"), own, range(4))
    first, second = ({name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in range(2))
    for t in range(1, 5):
        lr = 0.1 / t
        for name, gradient in gradients(t - 1).items():
            g = gradient.double()
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            expected[name] *= 1 - lr * decay(name)
            denominator = (second[name] / (1 - 0.95**t)).sqrt() + 1e-8
            expected[name] -= lr / (1 - 0.9**t) * first[name] / denominator
    assert_near(own, expected)


@pytest.mark.parametrize(
    ("kind", "momentum", "nesterov"), [("sgd", 0.9, 0), ("sgd-nesterov", 0.9, 1), ("sgd-plain", 0, 0)]
)
def test_sgd_is_its_formula(kind: str, momentum: float, nesterov: bool) -> None:
    own, expected = parameters(), {name: p.detach().clone().double() for name, p in parameters().items()}
    take(built(own, kind), own, range(4))
    average = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for t in range(1, 5):
        for name, gradient in gradients(t - 1).items():
            g = gradient.double() + decay(name) * expected[name]
            average[name] = momentum * average[name] + g
            expected[name] -= 0.1 / t * (g + momentum * average[name] if nesterov else average[name])
    assert_near(own, expected)


@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor_is_that_of_transformers(scaled: bool) -> None:
    own, expected = parameters(), parameters()
    values = {"weight_decay": 0.0 if scaled else 0.3, "scale_parameter": scaled, "clip_threshold": 0.9}
    take(built(own, "adafactor", **values), own, range(5))
    groups = [{"params": [p], "weight_decay": 0.0 if scaled else decay(name)} for name, p in expected.items()]
    theirs = Adafactor(groups, lr=0.1, clip_threshold=0.9, scale_parameter=scaled, relative_step=False)
    for step in range(5):
        for group in theirs.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for name, gradient in gradients(step).items():
            expected[name].grad = gradient
        theirs.step()
    assert_near(own, expected)


def test_adafactor_decays_by_the_learning_rate_alone() -> None:
    own = parameters()
    before = {name: p.detach().clone() for name, p in own.items()}
    updater = built(own, "adafactor-scaled")
    for parameter in own.values():
        parameter.grad = torch.zeros_like(parameter)
    updater.set_factor(0.5)
    updater.step()
    assert_near(own, {name: weight * (1 - 0.05 * decay(name)) for name, weight in before.items()})


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_torch_beside_adamw(adjust: str, nesterov: bool) -> None:
    own, expected = parameters(), parameters()
    take(built(own, "muon", adjust_lr=adjust, nesterov=nesterov), own, range(5))
    hidden = {name: p for name, p in expected.items() if name in {"layer.weight", "down.weight"}}
    others = [{"params": [p], "weight_decay": decay(name)} for name, p in expected.items() if name not in hidden]
    muon = torch.optim.Muon(hidden.values(), weight_decay=0.3, adjust_lr_fn=adjust, nesterov=nesterov)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), fused=True)
    for step in range(5):
        for optimizer, lr in ((muon, 0.1), (adamw, 0.01)):
            for group in optimizer.param_groups:
                group["lr"] = lr / (step + 1)
        for name, gradient in gradients(step).items():
            expected[name].grad = gradient
        muon.step()
        adamw.step()
    for name, parameter in own.items():
        assert torch.equal(parameter, expected[name]), name


def test_muon_makes_updates_nearly_orthogonal() -> None:
    """Against Newton-Schulz in float32 from its coefficients: bf16 keeps three digits."""
    own, before = parameters(), parameters()
    updater = built(own, "muon", weight_decay=0.0, adjust_lr="original")
    take(updater, own, range(1))
    for name, size in (("layer.weight", math.sqrt(6 / 4)), ("down.weight", 1.0)):
        # The first step's average is 0.05 g, and the look ahead 0.95 (0.05 g) + 0.05 g: a multiple of g.
        x = gradients(0)[name] / gradients(0)[name].norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        update = (before[name] - own[name]).detach() / (0.1 * size)
        torch.testing.assert_close(update, x, rtol=0.0, atol=0.03)
        assert torch.linalg.svdvals(update).min() > 0.5


def test_muon_needs_a_hidden_matrix() -> None:
    with pytest.raises(RecipeError, match="no hidden matrix"):
        built({"embed.weight": nn.Parameter(torch.zeros(4, 4))}, "muon")


@pytest.mark.parametrize("kind", KINDS)
def test_state_taken_over_goes_on_bit_for_bit(kind: str) -> None:
    straight = parameters()
    take(built(straight, kind), straight, range(6))
    own = parameters()
    before = built(own, kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in before.state_tensors().items()}
    take(before, own, range(3))
    assert {name: tuple(tensor.shape) for name, tensor in before.state_tensors().items()} == shapes
    after = built(own, kind)
    for name, tensor in after.state_tensors().items():
        tensor.copy_(before.state_tensors()[name])
    after.set_step_count(3)
    take(after, own, range(3, 6))
    for name, parameter in own.items():
        assert torch.equal(parameter, straight[name]), name


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_on_the_device_leaves_a_step_out(kind: str, bad: float, first: bool) -> None:
    own, other = parameters(), parameters()
    flagged, plain = built(own, kind), built(other, kind)
    done = range(0 if first else 1)
    take(flagged, own, done)
    take(plain, other, done)
    for updater, taken in ((flagged, own), (plain, other)):
        updater.set_factor(0.7)
        for name, gradient in gradients(7).items():
            taken[name].grad = gradient
            gradient[0] = math.nan if bad else 0.5
    assert flagged.takes_flag
    flagged.step(torch.tensor(bad))
    if not bad:
        plain.step()
    take(flagged, own, range(1, 3))
    take(plain, other, range(1, 3))
    for name, parameter in own.items():
        assert torch.equal(parameter, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_divided_on_the_device(kind: str) -> None:
    own, other = parameters(), parameters()
    divided, plain = built(own, kind), built(other, kind)
    for updater, taken, divisor in ((divided, own, torch.tensor(4.0)), (plain, other, None)):
        for name, gradient in gradients(0).items():
            taken[name].grad = gradient if divisor is not None else gradient / 4
        updater.set_factor(1.0)
        updater.step(torch.tensor(False), divisor)
    for name, parameter in own.items():
        assert torch.equal(parameter, other[name]), name


@pytest.mark.parametrize(("kind", "moments"), tables.cases(__file__, "state_has_names"))
def test_state_has_names(kind: str, moments: list[str]) -> None:
    names = [name.split("/", 2) for name in built(parameters(), kind).state_tensors()]
    assert {moment for _, moment, _ in names} == set(moments)
    assert all(first == "optimizer" and parameter in SHAPES for first, _, parameter in names)


def test_groups_have_settings_of_their_own() -> None:
    """Gradients of 1 make AdamW's first step the learning rate, beside the decay."""
    own, before = parameters(), parameters()
    groups = [
        {"match": ["layer.bias", "norm"], "lr": 0.02, "weight_decay": 0.5},
        {"match": "layer", "weight_decay": 0.2},
        {"match": ["experts.*"], "lr": 0.03},
    ]
    updater = built(own, "adamw", groups=groups)
    assert updater.peak_lr == 0.1
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    updater.set_factor(0.5)
    updater.step()
    expected = {
        "embed.weight": (0.1, 0.3), "down.weight": (0.1, 0.3), "layer.weight": (0.1, 0.2), "layer.bias": (0.02, 0.0),
        "norm.weight": (0.02, 0.0), "experts.up": (0.03, 0.3),
    }
    assert_near(own, {n: before[n] * (1 - 0.5 * lr * decay) - 0.5 * lr for n, (lr, decay) in expected.items()})


def test_groups_reach_both_optimizers_of_muon() -> None:
    own, before = parameters(), parameters()
    updater = built(own, "muon", weight_decay=0.0, groups=[{"match": ["down", "norm"], "lr": 1e-6}])
    take(updater, own, range(1))
    moved = {name: (before[name] - p).abs().max().item() for name, p in own.items()}
    assert {name for name, distance in moved.items() if distance < 1e-5} == {"down.weight", "norm.weight"}


@pytest.mark.parametrize(("groups", "message"), tables.cases(__file__, "a_group_without_parameters_is_refused"))
def test_a_group_without_parameters_is_refused(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        built(parameters(), "adamw", groups=groups)
    assert "layer" in str(caught.value.hint) or "narrower" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "shape", "matrix"), tables.cases(__file__, "matrices_decay_and_others_never"))
def test_matrices_decay_and_others_never(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    assert is_matrix(name, torch.zeros(shape)) is matrix
