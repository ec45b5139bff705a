"""Simple preference optimization (Meng et al. 2024, https://arxiv.org/abs/2405.14734): no reference.

The reward of an answer is beta times its average log-probability over its tokens; the loss of a pair is
``-log s(reward_c - reward_r - gamma)``.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import SimpoMethod
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import Sum, Terms
from tuner.train.methods.preference import PairMethod, answers, chosen_cross_entropy, pair_figures


class Simpo(PairMethod):
    """The mean over pairs of their losses, and one over the tokens of chosen answers where it has a weight."""

    def __init__(self, section: SimpoMethod) -> None:
        self._section = section
        self.by_document = section.sft_weight > 0

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> Terms:
        """The losses, and the figures of the rewards."""
        section, log_p = self._section, answers(hidden, head, targets, columns)
        average = log_p.per_token
        rewards = average._replace(chosen=section.beta * average.chosen, rejected=section.beta * average.rejected)
        losses = [Sum(-logsigmoid(rewards.difference - section.gamma).sum(), "pairs")]
        if section.sft_weight:
            losses.append(chosen_cross_entropy(log_p, section.sft_weight))
        return Terms(dict(zip(section.losses, losses, strict=True)), pair_figures(rewards, log_p))


def build(section: SimpoMethod) -> Simpo:
    """The loss that the section describes."""
    return Simpo(section)
