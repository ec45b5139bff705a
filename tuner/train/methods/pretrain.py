"""Next-token prediction on every token: the mean over the trained tokens of the global batch."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from tuner.config.methods import PretrainMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import Objective, OutputLayer
from tuner.train.methods.method import Counts, DeviceColumns, Method, Sum, Terms

LossAndFigures = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""The loss, and figures by name; each a sum over the positions."""


def cross_entropy(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> LossAndFigures:
    """The loss of next-token prediction; nothing else is logged."""
    return head.cross_entropy(hidden, targets), {}


class TokenMean(Method):
    """Loss and figures per trained token, such as cross-entropy in nats."""

    def __init__(self, loss: Objective[LossAndFigures] = cross_entropy) -> None:
        self._loss = loss

    def counts(self, batches: StepBatches) -> Counts:
        """Trained tokens."""
        return {"tokens": batches.trained_count}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """Nothing."""
        return {}

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """What the loss function gives."""
        loss, figures = self._loss(hidden, head, targets)
        return Terms({"loss": Sum(loss, "tokens")}, {name: Sum(value, "tokens") for name, value in figures.items()})


def build(section: PretrainMethod) -> TokenMean:
    """Every token counts the same."""
    return TokenMean()
