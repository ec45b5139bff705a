"""Methods of a user's own: one that averages by document first, and one of pairs of documents beside a reference."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Sum, Terms

BETA, ALPHA = 0.5, 0.25


def reference(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The log-probability that another model gives each document, by its number in the split."""
    return -(documents % 7).astype(np.float32)


def by_document(head: OutputLayer, hidden: torch.Tensor, targets: torch.Tensor, columns: Any) -> torch.Tensor:
    """The summed loss of each document of the micro-batch."""
    losses = head.losses(hidden, targets)
    return losses.new_zeros(len(columns["trained"])).index_add(0, columns["document"], losses)


class Averaged:
    """The mean over documents of the mean over their tokens."""

    by_document = True

    def counts(self, batches: StepBatches) -> Mapping[str, float]:
        assert batches.trained_per_document is not None
        return {"documents": np.count_nonzero(batches.trained_per_document), "tokens": batches.trained_count}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        return {"document": batch.document_of_trained, "trained": batch.trained_per_document}

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        sums = by_document(head, hidden, targets, columns)
        loss = (sums / columns["trained"].clamp_min(1)).sum()
        return Terms({"loss": Sum(loss, "documents")}, {"token_loss": Sum(sums.detach().sum(), "tokens")})


class Preferred:
    """Of each two neighbours the first is preferred (DPO), and its tokens are learned too: two terms and two counts."""

    by_document = True

    def counts(self, batches: StepBatches) -> Mapping[str, float]:
        assert batches.trained_per_document is not None
        return {"pairs": len(batches.trained_per_document) / 2, "chosen": batches.trained_per_document[::2].sum()}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        documents = {"document": batch.document_of_trained, "trained": batch.trained_per_document}
        return {**documents, "reference": reference(batch.documents)}

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        sums = by_document(head, hidden, targets, columns)
        chosen, rejected = (-sums - columns["reference"]).reshape(-1, 2).unbind(1)
        preference = -logsigmoid(BETA * (chosen - rejected)).sum()
        losses = {"preference": Sum(preference, "pairs"), "nll": Sum(ALPHA * sums[::2].sum(), "chosen")}
        return Terms(losses, {"accuracy": Sum((chosen > rejected).sum(), "pairs")})
