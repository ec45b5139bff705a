"""The output layer as a loss gets it: what turns the last hidden states into losses, without the logits of all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tuner.model.liger_loss import loss_into_gradient
from tuner.model.linear_cross_entropy import (
    Kernel,
    linear_cross_entropy,
    position_losses,
    softmax_into_gradient,
    transformed,
)
from tuner.model.logit_transform import PLAIN, LogitTransform
from tuner.model.native.cross_entropy import native_into_gradient

KERNELS: Mapping[str, Kernel] = {
    "liger": loss_into_gradient,
    "native": native_into_gradient,
    "torch": softmax_into_gradient,
}
"""What turns logits into loss and gradient, by the recipe's `model.kernels`."""


@dataclass(frozen=True)
class OutputLayer:
    """Weight ``[V, D]``, bias ``[V]`` or None, what the model does to their products, and the kernel of the loss.

    Under FSDP2 the weight is whole inside the root's forward alone: a loss is computed there.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    transform: LogitTransform = PLAIN
    kernel: Kernel = softmax_into_gradient

    def cross_entropy(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of the cross-entropies in nats at N positions, each times its weight, with a gradient: a float32 scalar.

        Shapes: hidden ``[N, D]``, targets int64 ``[N]``, weights float32 ``[N]`` or None for ones. The cheapest loss:
        the gradient is made while the logits are there.
        """
        kernel = transformed(self.kernel, self.transform)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets, kernel, weights)

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The cross-entropy at each position, float32 ``[N]``, for any function of them; its gradient costs the logits
        a second time."""
        return position_losses(hidden, self.weight, self.bias, targets, self.transform, self.kernel)


Result = TypeVar("Result")
Objective = Callable[[torch.Tensor, OutputLayer, torch.Tensor], Result]
"""From the last hidden states ``[N, D]`` at N positions, the output layer, and targets int64 ``[N]``, to anything."""


def summed_cross_entropy(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """The objective of next-token prediction."""
    return head.cross_entropy(hidden, targets)
