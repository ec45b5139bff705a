"""Contrastive preference optimization (Xu et al. 2024, https://arxiv.org/abs/2401.08417): no reference.

The reward of an answer is beta times its log-probability. The loss is the mean over pairs of
``-log s(reward_c - reward_r)`` and, as in the paper, the cross-entropy of chosen answers, here per token, by a weight.
"""

from tuner.config.methods import CpoMethod
from tuner.train.methods.preference import RewardOfAnswers


def build(section: CpoMethod) -> RewardOfAnswers:
    """The loss that the section describes."""
    return RewardOfAnswers(section.losses, lambda log_p: log_p.times(section.beta), sft_weight=section.sft_weight)
