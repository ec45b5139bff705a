"""Reward models by the loss of Bradley and Terry (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155).

A document's reward is the score of its last token. The loss of a pair is ``-log sigmoid(chosen - rejected - margin)``,
with the margin of its row where that is wanted (Touvron et al. 2023, https://arxiv.org/abs/2307.09288). It knows
differences alone: ``center`` times ``(chosen + rejected)^2`` keeps the rewards around 0 (Eisenstein et al. 2023,
https://arxiv.org/abs/2312.09244).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from tuner.config.methods import RewardMethod
from tuner.data.batches import Batch
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import DeviceColumns, Sum, Terms
from tuner.train.methods.preference import MARGIN, PairMethod, require_margins, reward_figures, with_zeros


class Reward(PairMethod):
    """The mean over pairs of their losses; rewards are float32 whatever the model computes in."""

    def __init__(self, section: RewardMethod) -> None:
        self._center, self._has_margin = section.center, section.margin == "rows"

    def positions(self, batch: Batch) -> npt.NDArray[np.int64]:
        """int64[documents]: the last token of each document, whatever token that is."""
        return np.cumsum(batch.lengths, dtype=np.int64)[: len(batch.documents)] - 1

    def made_up(self, batch: Batch) -> Batch:
        """With margins of 0."""
        return with_zeros(batch, MARGIN)

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """The margins, where they are wanted. Raises DataError for rows that have none."""
        if not self._has_margin:
            return {}
        require_margins(batch)
        return {MARGIN: batch.columns[MARGIN]}

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The loss and the figures of the rewards; with a center two losses, `ranking` and `center`."""
        rewards = head.scores(hidden)
        chosen, rejected = rewards[::2], rewards[1::2]
        difference = chosen - rejected - columns[MARGIN][::2] if self._has_margin else chosen - rejected
        ranking = Sum(-logsigmoid(difference).sum(), "pairs")
        figures = reward_figures(chosen, rejected)
        if not self._center:
            return Terms({"loss": ranking}, figures)
        center = Sum(self._center * (chosen + rejected).square().sum(), "pairs")
        return Terms({"ranking": ranking, "center": center}, figures)


build = Reward
"""The loss that a section describes."""
