"""Supervised fine-tuning: next-token prediction on the tokens that ``train_on`` leaves to be learned.

Three means over the global batch, by ``reduction``; l is the loss at a trained token and n(d) the number of them in
document d. `token`: the sum of l over the number of tokens. `document`: the mean over documents of each one's mean.
`sqrt`: each document's mean counts by the square root of n(d). XTuner calls the last two `sample` and `square`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tuner.config.methods import SftMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Counts, DeviceColumns, Method, Sum, Terms
from tuner.train.methods.pretrain import TokenMean


class DocumentMean(Method):
    """The mean over documents of their tokens' mean loss, in which a document of n trained tokens counts ``share(n)``.

    A document that is split into several rows counts as one for each of its pieces.
    """

    by_document = True

    def __init__(self, share: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]) -> None:
        self._share = share

    def counts(self, batches: StepBatches) -> Counts:
        """The shares of all documents in which a token is trained."""
        if batches.trained_per_document is None:
            raise ValueError("the batches were made without by_document")
        trained = batches.trained_per_document[batches.trained_per_document > 0]
        return {"documents": float(self._share(trained.astype(np.float64)).sum())}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """The weight of each trained position: its document's share over its trained tokens."""
        trained = batch.trained_per_document.clip(1).astype(np.float64)
        return {"weights": (self._share(trained) / trained)[batch.document_of_trained].astype(np.float32)}

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The cross-entropy, summed by weight."""
        return Terms({"loss": Sum(head.cross_entropy(hidden, targets, columns["weights"]), "documents")}, {})


def build(section: SftMethod) -> Method:
    """The mean that ``reduction`` names."""
    if section.reduction == "token":
        return TokenMean()
    return DocumentMean(np.ones_like if section.reduction == "document" else np.sqrt)
