"""Gradients of a decoder layer that are added to those of earlier micro-batches by one kernel, on a GPU.

Autograd adds each parameter's gradient as it comes: a kernel a parameter and micro-batch, 310 for a model of 0.6 B, and
each is so small that launching it takes longer than the sum. Taken from the parameter, the gradients of a layer lie
there until all are, and are added by one launch. They are the same sums, to the bit. A compiled layer makes all its
gradients before the first is added, so that none is kept longer than it was.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tuner.data.batches import Batch
from tuner.runtime.torch_private import add_each
from tuner.train.methods.method import Terms
from tuner.train.step_parts import StepForwards, StepPart

_NUMBERED = re.compile(r".*?\.\d+\.")
"""How the name of a layer's parameter begins."""


@dataclass
class _Layer:
    parameters: Sequence[nn.Parameter]
    waits: int = 0
    """How many of them have no gradient of this micro-batch yet."""
    sums: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Of earlier micro-batches."""

    def made(self, parameter: torch.Tensor) -> None:
        """A parameter has its gradient; after the last, all are added."""
        self.waits -= 1
        if not self.waits:
            self.add()

    @torch.no_grad()
    def add(self) -> None:
        """Take the gradients that there are from their parameters, and add them up."""
        found = {one: one.grad for one in self.parameters if one.grad is not None}
        if both := [one for one in found if one in self.sums]:
            add_each([self.sums[one] for one in both], [found[one] for one in both])
        self.sums = found | self.sums
        for one in found:
            one.grad = None
        self.waits = len(self.parameters)


class GroupedGradients(StepPart):
    """Of these parameters those that belong to a layer, and of which no other process has a part.

    FSDP2 adds up what it has received.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            if (numbered := _NUMBERED.match(name)) and not isinstance(parameter, DTensor):
                layers.setdefault(numbered[0], []).append(parameter)
        self._layers = [_Layer(own) for own in layers.values() if len(own) > 1]
        for layer in self._layers:
            for parameter in layer.parameters:
                parameter.register_post_accumulate_grad_hook(layer.made)

    def before_forward(self, step: StepForwards) -> None:
        """The step begins: whatever a step that failed left is gone."""
        for layer in self._layers:
            layer.sums = {}

    def terms(self, batch: Batch, terms: Terms) -> Terms:
        """A backward pass is next: what the last one gave of layers of which it did not reach all parameters."""
        for layer in self._layers:
            layer.add()
        return terms

    def after_backward(self) -> None:
        """The sums are the parameters' gradients."""
        for layer in self._layers:
            layer.add()
            for one, total in layer.sums.items():
                one.grad = total
            layer.sums = {}
