"""What a forward pass computes from the last hidden states: the loss, and figures that are logged beside it."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from tuner.errors import PluginError, TunerError
from tuner.model.linear_cross_entropy import Kernel, linear_cross_entropy, shaped, softmax_into_gradient
from tuner.model.logit_shape import PLAIN, LogitShape
from tuner.runtime.plugins import failure, source_file

LossFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]
]
"""From hidden states ``[N, D]``, the output layer's weight ``[V, D]`` and bias ``[V]`` or None, and targets int64
``[N]``: the sum of the losses at the N trained positions (a scalar with a gradient, also for N = 0) and named sums."""


class Objective(Protocol):
    """The loss of a method. Sums, not means: they are divided once by the trained tokens of the whole global batch."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        shape: LogitShape = PLAIN,
    ) -> torch.Tensor:
        """The summed loss at N trained positions, a float32 scalar; shapes as in :data:`LossFunction`."""
        ...

    def take(self) -> dict[str, torch.Tensor]:
        """The sums of the named figures since they were taken last, scalars on the device; the same names each time."""
        ...


class CrossEntropy:
    """Next-token prediction; it logs nothing beside its loss."""

    def __init__(self, kernel: Kernel = softmax_into_gradient) -> None:
        self._kernel = kernel

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        shape: LogitShape = PLAIN,
    ) -> torch.Tensor:
        """See :func:`~tuner.model.linear_cross_entropy.linear_cross_entropy`."""
        return linear_cross_entropy(hidden, weight, bias, targets, shaped(self._kernel, shape))

    def take(self) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}


class CustomObjective:
    """A loss function of the user's own, whose figures, under any names but those ``taken``, are summed up."""

    def __init__(self, function: LossFunction, name: str, taken: Collection[str] = ()) -> None:
        self._function, self._name, self._taken, self._file = function, name, taken, source_file(function)
        self._sums: dict[str, torch.Tensor] = {}
        self._names: tuple[str, ...] | None = None

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        shape: LogitShape = PLAIN,
    ) -> torch.Tensor:
        """Call the function. Raises PluginError for what it raises, and a result that :data:`LossFunction` is not.

        It knows no factor of the logits, which is put into what it is given; a model with a cap is refused at start.
        """
        if shape.scale != 1:
            hidden, bias = hidden * shape.scale, None if bias is None else bias * shape.scale
        try:
            result = self._function(hidden, weight, bias, targets)
        except (TunerError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise failure(f"{self._name} failed", error, self._file) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise PluginError(f"{self._name} returned no pair of a loss and a mapping", hint="return loss, {}")
        loss, figures = result
        tensors = {"the loss": loss, **figures}
        bad = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor) or value.ndim]
        if bad:
            raise PluginError(f"{self._name}: {bad[0]} is no scalar tensor", hint="sum over the positions")
        names = tuple(figures)
        if self._names is not None and names != self._names:
            raise PluginError(f"{self._name} returned the figures {names}, and {self._names} before")
        if self._names is None and (clash := sorted(set(names) & set(self._taken))):
            raise PluginError(f"{self._name}: the figure {clash[0]} has the name of another", hint="rename it")
        self._names = names
        for key, value in figures.items():
            known = self._sums.get(key)
            self._sums[key] = value.detach() if known is None else known + value.detach()
        return loss.float()

    def take(self) -> dict[str, torch.Tensor]:
        """The sums of the figures, which start again from nothing."""
        taken, self._sums = self._sums, {}
        return taken
