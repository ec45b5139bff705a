"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306): answers with labels.

The log-ratio r of an answer is its log-probability less what the reference gives it, its implicit reward beta times
that. z is the mean log-ratio of mismatched documents, prompts with the answers to others, at least 0: an estimate of
the divergence of the policy from the reference. The loss of a desirable answer is its weight times
``1 - s(beta (r - z))``, of an undesirable one ``1 - s(beta (z - r))``; z has no gradient and is computed over the whole
global batch before the first forward, so that neither micro-batches nor processes change it. With z = 0 it is APO-zero
for answers with labels (D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266).
"""

from dataclasses import replace

import numpy as np
import torch

from tuner.config.methods import KtoMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Counts, DeviceColumns, Sum, Sums, Terms
from tuner.train.methods.preference import REFERENCE, AnswerMethod, log_probabilities

LABEL = "label"
"""The column that says of each document whether its answer is desirable."""
MISMATCHED = "reference_mismatched"
"""The column of what the reference gives each document's prompt with the answer of its partner."""


class Kto(AnswerMethod):
    """The mean over documents of their losses."""

    by_document = True

    def __init__(self, section: KtoMethod) -> None:
        self._section = section
        self.reference = "adapter_off" if section.reference == "adapter_off" else "columns"

    @property
    def mismatched(self) -> bool:
        """For the divergence."""
        return self._section.baseline == "kl"

    @property
    def extra_forwards(self) -> int:
        """Those of mismatched documents besides."""
        return (2 if self.reference == "adapter_off" else 1) * (1 + self.mismatched) - 1

    def counts(self, batches: StepBatches) -> Counts:
        """Documents, those of each label, and mismatched ones."""
        labels = batches.columns.get(LABEL, np.empty(0, np.bool_))
        desirable = int(np.count_nonzero(labels))
        counts = {"documents": batches.documents, "mismatched": batches.documents if batches.mismatched else 0}
        return counts | {"desirable": desirable, "undesirable": batches.documents - desirable}

    def made_up(self, batch: Batch) -> Batch:
        """With labels, and a reference that gives nothing where the reference is columns."""
        count = len(batch.documents)
        made = {LABEL: np.arange(count) % 2 == 0}
        if self.mismatched and self.reference == "columns":
            made[MISMATCHED] = np.zeros(count, np.float32)
        filled = super().made_up(batch)
        return replace(filled, columns={**made, **filled.columns})

    def estimates(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Sums:
        """The log-ratios of mismatched documents."""
        reference = columns[MISMATCHED if self.reference == "columns" else REFERENCE]
        ratios = log_probabilities(hidden, head, targets, columns["trained"]) - reference
        return {"kl": Sum(ratios.sum(), "mismatched")}

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The loss, and the figures of the implicit rewards."""
        section, good = self._section, columns[LABEL]
        ratios = log_probabilities(hidden, head, targets, columns["trained"]) - columns[REFERENCE]
        kl = columns["kl"].clamp_min(0).to(ratios.dtype) if self.mismatched else ratios.new_zeros(())
        weights = torch.full_like(ratios, section.undesirable_weight).masked_fill(good, section.desirable_weight)
        signed = torch.where(good, kl - ratios, ratios - kl)
        loss = (weights * torch.sigmoid(section.beta * signed)).sum()
        rewards = section.beta * ratios.detach()
        each = {"desirable": good, "undesirable": ~good}
        figures = {f"reward_{label}": Sum((rewards * of_label).sum(), label) for label, of_label in each.items()}
        if self.mismatched:
            figures["kl"] = Sum(kl * len(good), "documents")
        return Terms({"loss": Sum(loss, "documents")}, figures)


build = Kto
"""The loss that a section describes."""
