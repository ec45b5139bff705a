"""What methods over answers share: log-probabilities of documents, and the figures that people look at.

A document is a prompt with an answer, of which the answer is trained. Its log-probability is the sum over the answer's
tokens. In data of pairs an example is two documents next to each other: the prompt with the chosen answer, then with
the rejected one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from tuner.data.batches import Batch, StepBatches
from tuner.errors import DataError
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Counts, DeviceColumns, Method, Sum, Sums, Terms

REFERENCE = "reference"
"""The column of what the reference gives each document: the summed log-probability of its answer, in nats."""
MARGIN = "margin"
"""The column of margins, the same for both documents of a pair."""


def log_probabilities(
    hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Summed log-probabilities in nats of documents, float32 ``[documents]``.

    The N trained positions lie document by document, ``lengths`` int64 ``[documents]`` of each. A document's sum has
    one order whatever lies around it, and is rounded once: two models that agree give the same bits, and what remains
    of their difference is no rounding of a long sum.
    """
    found = -head.losses(hidden, targets)
    if len(lengths) == 0:  # a batch that keeps a rank in step with others
        return found
    # Unsafe: the lengths are sums of a mask that is known; to check them would read the device.
    return torch.segment_reduce(found.double(), "sum", lengths=lengths, unsafe=True).to(found.dtype)


class Pairs(NamedTuple):
    """A value of each answer, and the trained tokens that it has: ``[pairs]`` each."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    margin: torch.Tensor | float = 0.0
    """By how much the chosen answer's reward has to be the higher one, where rows say so."""

    @staticmethod
    def of(values: torch.Tensor, tokens: torch.Tensor) -> "Pairs":
        """Values and tokens of documents ``[documents]``, two by two."""
        return Pairs(values[::2], values[1::2], tokens[::2], tokens[1::2])

    @property
    def per_token(self) -> "Pairs":
        """The values divided by the tokens."""
        chosen = self.chosen / self.chosen_tokens.clamp_min(1)
        return self._replace(chosen=chosen, rejected=self.rejected / self.rejected_tokens.clamp_min(1))

    @property
    def detached(self) -> "Pairs":
        """The values without a gradient: a figure made of them keeps nothing until the backward pass."""
        return self._replace(chosen=self.chosen.detach(), rejected=self.rejected.detach())

    def times(self, factor: float) -> "Pairs":
        """The values multiplied."""
        return self._replace(chosen=factor * self.chosen, rejected=factor * self.rejected)

    @property
    def difference(self) -> torch.Tensor:
        """By how much the chosen answer's value is the larger one."""
        return self.chosen - self.rejected


def answers(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Pairs:
    """The log-probabilities of chosen and rejected answers."""
    tokens = columns["trained"]
    return Pairs.of(log_probabilities(hidden, head, targets, tokens), tokens)


def with_zeros(batch: Batch, name: str) -> Batch:
    """With a column of zeros for each document, where it has none of that name."""
    made: npt.NDArray[np.float32] = np.zeros(len(batch.documents), dtype=np.float32)
    return replace(batch, columns={name: made, **batch.columns})


def require_margins(batch: Batch) -> None:
    """Raise DataError for rows that have no margins."""
    if MARGIN not in batch.columns:
        raise DataError(
            "method.margin: rows: the rows have neither a margin nor scores",
            hint="write method.margin: none, or add a margin to each row",
        )


class AnswerMethod(Method):
    """A loss of the log-probabilities of answers."""

    by_terms = True

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """Trained tokens of each document, and what the documents have besides."""
        return {"trained": batch.trained_per_document, **batch.columns}

    def made_up(self, batch: Batch) -> Batch:
        """With a reference that gives nothing, where the reference is columns."""
        return with_zeros(batch, REFERENCE) if self.reference == "columns" else batch

    def reference_values(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns
    ) -> dict[str, torch.Tensor]:
        """The log-probability of each answer."""
        return {REFERENCE: log_probabilities(hidden, head, targets, columns["trained"])}


class PairMethod(AnswerMethod):
    """A mean over pairs, and where ``by_document`` is set one over the tokens of chosen answers."""

    def counts(self, batches: StepBatches) -> Counts:
        """Pairs, and where they are asked for trained tokens of chosen answers."""
        counts = {"pairs": batches.documents // 2}
        if batches.trained_per_document is not None:
            counts["chosen_tokens"] = int(batches.trained_per_document[::2].sum())
        return counts


def chosen_cross_entropy(log_p: Pairs, weight: float) -> Sum:
    """The cross-entropy of the chosen answers, per token, times ``weight``."""
    return Sum(-weight * log_p.chosen.sum(), "chosen_tokens")


def reward_figures(chosen: torch.Tensor, rejected: torch.Tensor) -> Sums:
    """Means over pairs of rewards ``[pairs]``, of their difference, and of how often the chosen answer's is higher."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "reward_chosen": Sum(chosen.sum(), "pairs"), "reward_rejected": Sum(rejected.sum(), "pairs"),
        "margin": Sum((chosen - rejected).sum(), "pairs"), "accuracy": Sum((chosen > rejected).sum(), "pairs"),
    }


def pair_figures(rewards: Pairs, log_p: Pairs) -> Sums:
    """Those of the rewards, and the mean log-probability of chosen and of rejected answers."""
    chosen, rejected = (Sum(one.detach().sum(), "pairs") for one in (log_p.chosen, log_p.rejected))
    return reward_figures(rewards.chosen, rewards.rejected) | {"logp_chosen": chosen, "logp_rejected": rejected}


class RewardOfAnswers(PairMethod):
    """Rewards by the log-probabilities of answers alone, without a reference.

    The loss is the mean over pairs of ``-log sigmoid(reward_c - reward_r - gamma)`` and, with a weight, the
    cross-entropy of chosen answers per token. ``losses`` are its names, ``rewards`` gives them from log-probabilities.
    """

    def __init__(
        self, losses: Sequence[str], rewards: Callable[[Pairs], Pairs], gamma: float = 0.0, sft_weight: float = 0.0
    ) -> None:
        self._losses, self._rewards, self._gamma, self._sft_weight = losses, rewards, gamma, sft_weight
        self.by_document = sft_weight > 0

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The losses, and the figures of the rewards."""
        log_p = answers(hidden, head, targets, columns)
        rewards = self._rewards(log_p)
        losses = [Sum(-logsigmoid(rewards.difference - self._gamma).sum(), "pairs")]
        if self._sft_weight:
            losses.append(chosen_cross_entropy(log_p, self._sft_weight))
        return Terms(dict(zip(self._losses, losses, strict=True)), pair_figures(rewards, log_p))


class AnswersAlone(PairMethod):
    """Pairs by the log-probabilities of their answers alone, for a model whose reference model is not loaded.

    The loss is the cross-entropy of chosen answers, per token. ``accuracy`` says how often the chosen answer is the
    more probable one, ``accuracy_per_token`` how often it is per token, which does not favour short answers.
    """

    by_document = True

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The figures, and what there is of a loss."""
        log_p = answers(hidden, head, targets, columns)
        figures = {
            "accuracy": Sum((log_p.difference > 0).sum(), "pairs"),
            "accuracy_per_token": Sum((log_p.per_token.difference > 0).sum(), "pairs"),
            "logp_chosen": Sum(log_p.chosen.sum(), "pairs"), "logp_rejected": Sum(log_p.rejected.sum(), "pairs"),
        }
        return Terms({"loss": chosen_cross_entropy(log_p, 1.0)}, figures)
