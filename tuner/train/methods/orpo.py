"""Odds ratio preference optimization (Hong et al. 2024, https://arxiv.org/abs/2403.07691): no reference.

The average log-probability a of an answer, over its tokens, makes the odds ``exp(a) / (1 - exp(a))``. The loss is the
cross-entropy of chosen answers, per token, and beta times the mean over pairs of ``-log s(log odds_c - log odds_r)``.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import OrpoMethod
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import DeviceColumns, Sum, Terms
from tuner.train.methods.preference import PairMethod, answers, chosen_cross_entropy, pair_figures


def log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """``log(p / (1 - p))`` of log-probabilities, at most 0; p counts as what is just below 1 where it rounds to 1.

    ``log(1 - exp(x))`` is ``log(-expm1(x))`` near 0 and ``log1p(-exp(x))`` elsewhere (Maechler 2012,
    https://cran.r-project.org/package=Rmpfr/vignettes/log1mexp-note.pdf).
    """
    log_p = log_p.clamp_max(-torch.finfo(log_p.dtype).eps)
    near = log_p > -math.log(2)
    # Both sides are computed, so each gets a value at which its gradient is finite.
    by_expm1 = torch.log(-torch.expm1(log_p.masked_fill(~near, -1.0)))
    by_exp = torch.log1p(-torch.exp(log_p.masked_fill(near, -1.0)))
    return log_p - torch.where(near, by_expm1, by_exp)


class Orpo(PairMethod):
    """A mean over the tokens of chosen answers, and one over pairs."""

    by_document = True

    def __init__(self, section: OrpoMethod) -> None:
        self._beta = section.beta

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """Both terms; the rewards are beta times the average log-probabilities."""
        log_p = answers(hidden, head, targets, columns)
        average = log_p.per_token
        ratios = log_odds(average.chosen) - log_odds(average.rejected)
        odds_ratio = Sum(-self._beta * logsigmoid(ratios).sum(), "pairs")
        losses = {"sft": chosen_cross_entropy(log_p, 1.0), "odds_ratio": odds_ratio}
        return Terms(losses, pair_figures(average.detached.times(self._beta), log_p))


build = Orpo
"""The loss that a section describes."""
