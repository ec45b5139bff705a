"""Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290).

The log-ratio of an answer is its log-probability less what the reference gives it; its implicit reward is beta times
that. The loss of a pair is ``-log sigmoid`` of the difference of both rewards.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import DpoMethod
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Sum, Terms
from tuner.train.methods.preference import REFERENCE, PairMethod, answers, reward_figures


class Dpo(PairMethod):
    """The mean over pairs of their losses."""

    def __init__(self, section: DpoMethod) -> None:
        self._beta = section.beta
        self.reference = "adapter_off" if section.reference == "adapter_off" else "columns"

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        """The loss, and the figures of the implicit rewards."""
        chosen, rejected = answers(hidden, head, targets, columns)
        reference = columns[REFERENCE]
        reward_chosen = self._beta * (chosen - reference[::2])
        reward_rejected = self._beta * (rejected - reference[1::2])
        loss = -logsigmoid(reward_chosen - reward_rejected).sum()
        return Terms({"loss": Sum(loss, "pairs")}, reward_figures(reward_chosen, reward_rejected))


def build(section: DpoMethod) -> Dpo:
    """The loss that the section describes."""
    return Dpo(section)
