"""Simple preference optimization (Meng et al. 2024, https://arxiv.org/abs/2405.14734): no reference.

The reward of an answer is beta times its average log-probability over its tokens; the loss of a pair is
``-log s(reward_c - reward_r - gamma)``.
"""

from tuner.config.methods import SimpoMethod
from tuner.train.methods.preference import RewardOfAnswers


def build(section: SimpoMethod) -> RewardOfAnswers:
    """The loss that the section describes."""
    return RewardOfAnswers(
        section.losses, lambda log_p: log_p.per_token.times(section.beta), section.gamma, section.sft_weight
    )
