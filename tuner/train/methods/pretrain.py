"""Next-token prediction on every token: the mean over the trained tokens of the global batch."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from tuner.config.recipe import PretrainMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Counts, Sum, Terms


class TokenMean:
    """Cross-entropy in nats per trained token; nothing is logged beside it."""

    by_document = False

    def counts(self, batches: StepBatches) -> Counts:
        """Trained tokens."""
        return {"tokens": batches.trained_count}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """Nothing."""
        return {}

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        """The summed cross-entropy."""
        return Terms({"loss": Sum(head.cross_entropy(hidden, targets), "tokens")}, {})


def build(section: PretrainMethod) -> TokenMean:
    """Every token counts the same."""
    return TokenMean()
