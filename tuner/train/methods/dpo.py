"""Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290), and losses after it.

The log-ratio r of an answer is its log-probability less what the reference gives it, and its implicit reward beta times
that; n is its trained tokens, _c marks the chosen answer, _r the rejected one, and s is the logistic function. The loss
of a pair, by `loss`:

- sigmoid: ``-log s(beta (r_c - r_r))``; with label smoothing e (Mitchell 2023, cDPO,
  https://ericmitchell.ai/cdpo.pdf) ``-(1 - e) log s(beta (r_c - r_r)) - e log s(-beta (r_c - r_r))``.
- robust (Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409): ``[-(1 - e) log s(x) + e log s(-x)] / (1 - 2e)``.
- hinge (Zhao et al. 2023, SLiC, https://arxiv.org/abs/2305.10425): ``max(0, 1 - beta (r_c - r_r))``.
- ipo (Azar et al. 2023, https://arxiv.org/abs/2310.12036): ``(r_c / n_c - r_r / n_r - 1 / (2 beta))^2``, log-ratios per
  token, as its authors told other implementations.
- sigmoid_norm (Lambert et al. 2024, Tulu 3, https://arxiv.org/abs/2411.15124, from SimPO's average):
  ``-log s(beta (r_c / n_c - r_r / n_r))``.
- apo_zero, apo_down (D'Oosterlinck et al. 2024, https://arxiv.org/abs/2408.06266): ``1 - s(beta r_c) + s(beta r_r)``
  and ``s(beta r_c) + 1 - s(beta (r_c - r_r))``.
- sppo (Wu et al. 2024, https://arxiv.org/abs/2405.00675, with hard labels):
  ``(r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2``.
- nca (Chen et al. 2024, https://arxiv.org/abs/2402.05369):
  ``-log s(beta r_c) - (log s(-beta r_c) + log s(-beta r_r)) / 2``.
- bco (Jung et al. 2024, https://arxiv.org/abs/2404.04656, without its shift of the rewards):
  ``-log s(beta r_c) - log s(-beta r_r)``.

With `margin: rows` the margin of its row is taken from ``beta (r_c - r_r)`` in sigmoid, robust and hinge (Amini et al.
2024, DPO with an offset, https://arxiv.org/abs/2402.10571).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import DpoLoss, DpoMethod
from tuner.data.batches import Batch
from tuner.model.output_layer import OutputLayer
from tuner.train.methods import preference
from tuner.train.methods.method import DeviceColumns, Sum, Terms

PairLoss = Callable[[preference.Pairs, DpoMethod], torch.Tensor]
"""From the log-ratios of the answers to the loss of each pair, ``[pairs]``."""


def _sigmoid(ratios: preference.Pairs, section: DpoMethod) -> torch.Tensor:
    wrong, x = section.label_smoothing, section.beta * ratios.difference - ratios.margin
    return -(1 - wrong) * logsigmoid(x) - wrong * logsigmoid(-x)


def _robust(ratios: preference.Pairs, section: DpoMethod) -> torch.Tensor:
    wrong, x = section.label_smoothing, section.beta * ratios.difference - ratios.margin
    return (wrong * logsigmoid(-x) - (1 - wrong) * logsigmoid(x)) / (1 - 2 * wrong)


def _nca(ratios: preference.Pairs, section: DpoMethod) -> torch.Tensor:
    chosen, rejected = section.beta * ratios.chosen, section.beta * ratios.rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


LOSSES: Mapping[DpoLoss, PairLoss] = {
    "sigmoid": _sigmoid, "hinge": lambda ratios, of: torch.relu(1 + ratios.margin - of.beta * ratios.difference),
    "ipo": lambda ratios, of: (ratios.per_token.difference - 1 / (2 * of.beta)) ** 2, "robust": _robust,
    "nca": _nca, "sigmoid_norm": lambda ratios, of: -logsigmoid(of.beta * ratios.per_token.difference),
    "apo_zero": lambda ratios, of: torch.sigmoid(-of.beta * ratios.chosen) + torch.sigmoid(of.beta * ratios.rejected),
    "apo_down": lambda ratios, of: torch.sigmoid(of.beta * ratios.chosen) + torch.sigmoid(-of.beta * ratios.difference),
    "sppo": lambda ratios, of: (ratios.chosen - 0.5 / of.beta) ** 2 + (ratios.rejected + 0.5 / of.beta) ** 2,
    "bco": lambda ratios, of: -logsigmoid(of.beta * ratios.chosen) - logsigmoid(-of.beta * ratios.rejected),
}


class Dpo(preference.PairMethod):
    """The mean over pairs of their losses, each times its weight, and one over the tokens of chosen answers."""

    def __init__(self, section: DpoMethod) -> None:
        self._section = section
        self.by_document = section.sft_weight > 0
        self.reference = "adapter_off" if section.reference == "adapter_off" else "columns"

    def made_up(self, batch: Batch) -> Batch:
        """With margins of 0 where they are wanted."""
        filled = super().made_up(batch)
        return filled if self._section.margin == "none" else preference.with_zeros(filled, preference.MARGIN)

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """Those of answers. Raises DataError where margins are wanted and rows have none."""
        if self._section.margin == "rows":
            preference.require_margins(batch)
        return super().columns(batch)

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The losses, and the figures of the implicit rewards."""
        section, reference = self._section, columns[preference.REFERENCE]
        log_p = preference.answers(hidden, head, targets, columns)
        ratios = log_p._replace(chosen=log_p.chosen - reference[::2], rejected=log_p.rejected - reference[1::2])
        if section.margin == "rows":
            ratios = ratios._replace(margin=columns[preference.MARGIN][::2])
        losses = [Sum(weight * LOSSES[one](ratios, section).sum(), "pairs") for one, weight in section.loss.items()]
        if section.sft_weight:
            losses.append(preference.chosen_cross_entropy(log_p, section.sft_weight))
        figures = preference.pair_figures(ratios.detached.times(section.beta), log_p)
        return Terms(dict(zip(section.losses, losses, strict=True)), figures)


build = Dpo
"""The loss that a section describes."""
