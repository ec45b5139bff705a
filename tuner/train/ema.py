"""An exponential moving average of the trained weights; each process keeps that of its own part of them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tuner.config.recipe import EmaSection
from tuner.parallel.fsdp import sharded_like
from tuner.runtime.parts import local
from tuner.train.step_parts import StepPart


class Ema(StepPart):
    """The averages of named parameters, in float32: ``decay`` of one stays at each update, the rest is the new weight.

    It begins at the weights as they are when it is made (Polyak and Juditsky 1992 average; the exponential form is that
    of Ruppert 1988 with a constant rate). An update that is left out leaves the averages as they are, too.
    """

    def __init__(
        self, root: nn.Module, parameters: Mapping[str, nn.Parameter], decay: float, prefix: str, evaluated: bool
    ) -> None:
        self._root, self._parameters, self._decay = root, dict(parameters), decay
        self._prefix, self._evaluated = prefix, evaluated
        """Of the names that checkpoints have for averages, and their figures; whether there are any of these."""
        self._averages = {name: local(p.data).detach().to(torch.float32, copy=True) for name, p in parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages by the prefixed names of their parameters, over the processes as these are."""
        prefix, own = self._prefix, self._parameters
        return {f"{prefix}{name}": sharded_like(average, own[name]) for name, average in self._averages.items()}

    def other_weights(self) -> dict[str, AbstractContextManager[None]]:
        """The averages, where the recipe evaluates them."""
        return {self._prefix: self.in_place()} if self._evaluated else {}

    def restart(self) -> None:
        """Start from the weights as they are now."""
        for name, average in self._averages.items():
            average.copy_(local(self._parameters[name].data))

    @torch.no_grad()
    def after_update(self, skip: torch.Tensor) -> None:
        """Take the weights after an update into the averages, unless ``skip``, a boolean scalar on the device."""
        share = torch.where(skip, 0.0, 1.0 - self._decay).float()
        for name, average in self._averages.items():
            average.lerp_(local(self._parameters[name].data).float(), share.to(average.device))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages in the place of the weights, which have their own bits again on leaving.

        The weights are kept next to them meanwhile: no more memory than the gradients of a step take.
        """
        kept = {name: local(parameter.data).clone() for name, parameter in self._parameters.items()}
        try:
            self._give(self._averages)
            yield
        finally:
            self._give(kept)

    def _give(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter.data).copy_(values[name])
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # or its next forward takes what it gathered before


def decay_of(section: EmaSection) -> float | None:
    """What of an average stays at each update; None where the recipe keeps none."""
    return section.decay if section.half_life is None else float(0.5 ** (1 / float(section.half_life.count)))
