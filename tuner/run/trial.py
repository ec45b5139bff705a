"""An optimizer of the user's own, tried on a handful of numbers before a model is loaded."""

import torch
from torch import nn

from tuner.config.optimizers import CustomOptimizer, Optimizer
from tuner.errors import PluginError
from tuner.train.optimizer import OptimizerSet, build_optimizer

SHAPES = {"model.layers.0.mlp.up_proj.weight": (6, 4), "model.norm.weight": (4,)}
STEPS = 4


def try_optimizer(section: Optimizer) -> None:
    """Take a few steps with an optimizer of the user's own, whole, interrupted and in parts; others are tested.

    Raises PluginError for one that fails, does not resume from its saved state bit for bit, or says that it is
    elementwise and is not.
    """
    if not isinstance(section, CustomOptimizer):
        return
    section = section.model_copy(update={"groups": ()})  # they name parameters of the model
    with torch.random.fork_rng(devices=[]):
        whole = _parameters()
        _take(build_optimizer(section, whole), whole, range(STEPS))
        if _equal(whole, _parameters()):
            raise PluginError(f"optimizer.use {section.use} changes nothing", hint="it must update the params in place")
        if not _equal(whole, _interrupted(section)):
            raise PluginError(
                f"optimizer.use {section.use} does not resume exactly from its saved state",
                hint="keep all that a step needs in the state of each parameter, as tensors",
            )
        if section.elementwise:
            _require_elementwise(section, whole)


def _interrupted(section: CustomOptimizer) -> dict[str, nn.Parameter]:
    """The parameters after as many steps, half of them by a second optimizer that took over the first one's state."""
    found = _parameters()
    before = build_optimizer(section, found)
    _take(before, found, range(STEPS // 2))
    saved = {name: tensor.clone() for name, tensor in before.state_tensors().items()}
    weights = {name: parameter.detach().clone() for name, parameter in found.items()}
    after = build_optimizer(section, found)
    after.allocate()
    if saved.keys() != (tensors := after.state_tensors()).keys():
        name = sorted(saved.keys() ^ tensors.keys())[0].removeprefix("optimizer/")
        raise PluginError(f"optimizer.use {section.use} keeps {name} only from a later step on")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(weights[name])
    after.set_step_count(STEPS // 2)
    _take(after, found, range(STEPS // 2, STEPS))
    return found


def _require_elementwise(section: CustomOptimizer, whole: dict[str, nn.Parameter]) -> None:
    """Update the rows of each parameter in two parts, as two processes would."""
    for rows in (slice(0, 3), slice(3, None)):
        part = {name: nn.Parameter(parameter.detach()[rows].clone()) for name, parameter in _parameters().items()}
        _take(build_optimizer(section, part), part, range(STEPS), rows)
        for name, parameter in part.items():
            if not torch.allclose(parameter, whole[name][rows], rtol=1e-5, atol=1e-7):
                raise PluginError(
                    f"optimizer.use {section.use} updates a part of a parameter differently from the whole",
                    hint="write elementwise: false; it then needs parallel.shard: none on several processes",
                )


def _take(updater: OptimizerSet, parameters: dict[str, nn.Parameter], steps: range, rows: slice = slice(None)) -> None:
    for step in steps:
        for number, (name, parameter) in enumerate(parameters.items()):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(SHAPES[name], generator=generator)[rows]
        torch.manual_seed(step)
        updater.set_factor(1 / (step + 1))
        updater.step(torch.tensor(False), torch.tensor(2.0))
        updater.zero_grad()


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _equal(one: dict[str, nn.Parameter], other: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
