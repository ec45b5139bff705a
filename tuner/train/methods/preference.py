"""What methods over pairs of answers share: log-probabilities of documents, and the figures that people look at.

An example is two documents next to each other, the prompt with the chosen answer and the prompt with the rejected one;
of each the answer is trained. Its log-probability is the sum over the answer's tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Counts, Method, Sum

REFERENCE = "reference"
"""The column of what the reference gives each document: the summed log-probability of its answer, in nats."""


def log_probabilities(
    hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Summed log-probabilities in nats of documents, float32 ``[documents]``.

    The N trained positions lie document by document, ``lengths`` int64 ``[documents]`` of each. A document's sum has
    one order whatever lies around it.
    """
    found = -head.losses(hidden, targets)
    if len(lengths) == 0:  # a batch that keeps a rank in step with others
        return found
    # Unsafe: the lengths are sums of a mask that is known; to check them would read the device.
    return torch.segment_reduce(found, "sum", lengths=lengths, unsafe=True)


def answers(
    hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of chosen and rejected answers, float32 ``[pairs]`` each."""
    both = log_probabilities(hidden, head, targets, columns["trained"])
    return both[::2], both[1::2]


class PairMethod(Method):
    """A mean over pairs."""

    by_terms = True

    def counts(self, batches: StepBatches) -> Counts:
        """Pairs."""
        return {"pairs": batches.documents // 2}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """Trained tokens of each document, and what the documents have besides."""
        return {"trained": batch.trained_per_document, **batch.columns}

    def made_up(self, batch: Batch) -> Batch:
        """With a reference that gives nothing, where the reference is columns."""
        if self.reference != "columns":
            return batch
        made: npt.NDArray[np.float32] = np.zeros(len(batch.documents), dtype=np.float32)
        return replace(batch, columns={REFERENCE: made, **batch.columns})

    def reference_values(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The log-probability of each answer."""
        return {REFERENCE: log_probabilities(hidden, head, targets, columns["trained"])}


def reward_figures(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, Sum]:
    """Means over pairs of implicit rewards ``[pairs]``, of their difference, and of how often the chosen one wins."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward_chosen": Sum(chosen.sum(), "pairs"),
        "reward_rejected": Sum(rejected.sum(), "pairs"),
        "margin": Sum((chosen - rejected).sum(), "pairs"),
        "accuracy": Sum((chosen > rejected).sum(), "pairs"),
    }
