"""Contrastive preference optimization (Xu et al. 2024, https://arxiv.org/abs/2401.08417): no reference.

The reward of an answer is beta times its log-probability. The loss is the mean over pairs of
``-log s(reward_c - reward_r)`` and, as in the paper, the cross-entropy of chosen answers, here per token, by a weight.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import CpoMethod
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Sum, Terms
from tuner.train.methods.preference import PairMethod, answers, chosen_cross_entropy, pair_figures


class Cpo(PairMethod):
    """The mean over pairs of their losses, and one over the tokens of chosen answers where it has a weight."""

    def __init__(self, section: CpoMethod) -> None:
        self._section = section
        self.by_document = section.sft_weight > 0

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        """The losses, and the figures of the rewards."""
        section, log_p = self._section, answers(hidden, head, targets, columns)
        rewards = log_p._replace(chosen=section.beta * log_p.chosen, rejected=section.beta * log_p.rejected)
        losses = [Sum(-logsigmoid(rewards.difference).sum(), "pairs")]
        if section.sft_weight:
            losses.append(chosen_cross_entropy(log_p, section.sft_weight))
        return Terms(dict(zip(section.losses, losses, strict=True)), pair_figures(rewards, log_p))


def build(section: CpoMethod) -> Cpo:
    """The loss that the section describes."""
    return Cpo(section)
