"""AdamW of the rows of an embedding that a step touches; all others, and their moments, keep their bits.

A row's moments decay, and its weights do, in the updates that touch it and in no others: nothing is caught up. Its bias
is corrected by the number of its own updates, not of the run's: after k of them its moments are averages of k gradients
from zero, whose sum of weights is 1 - beta^k. By the run's count a row whose token comes late would take its first step
(1 - beta1) / sqrt(1 - beta2) times as large as an early one. A row that every update touches is updated as by AdamW
(Loshchilov & Hutter 2019); with sparse gradients and without decay this is the lazy Adam of torch.optim.SparseAdam but
for that count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tuner.config.optimizers import AdamwOptimizer, MuonOptimizer, Optimizer, RowOptimizer
from tuner.model.touched_rows import TouchedRows
from tuner.runtime.device import target
from tuner.train.adamw_update import CHUNK
from tuner.train.moments import FlaggedOptimizer, zero_averages

UPDATES = "row_updates"
"""The moment that counts the updates of each row, float32 ``[V]``."""
_DEFAULTS = AdamwOptimizer()


class RowAdamW(FlaggedOptimizer):
    """Its parameters are a process's rows of embeddings as plain float32 tensors, ``touched`` has their gradients.

    Groups have ``lr``, ``weight_decay``, ``betas`` and ``eps``. Nothing in the update of a row depends on which process
    holds it, or on which other rows there are.
    """

    def __init__(self, groups: list[dict[str, Any]], touched: Mapping[torch.Tensor, TouchedRows]) -> None:
        super().__init__(groups)
        self._touched = dict(touched)
        for parameter in self._touched:
            self.state[parameter] = {
                **zero_averages(parameter),
                UPDATES: torch.zeros(len(parameter), dtype=torch.float32, device=parameter.device),
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter.detach(), self.state[parameter], self._touched[parameter], group)

    def drop(self) -> None:
        """Drop all gradients."""
        for touched in self._touched.values():
            touched.drop()

    def _update(
        self, weight: torch.Tensor, state: dict[str, torch.Tensor], touched: TouchedRows, group: dict[str, Any]
    ) -> None:
        """Update what a step touches of a weight ``[rows, D]``, in place, some rows at a time."""
        rows, gradient = touched.rows, touched.gradient
        if rows is None or gradient is None:
            return
        kind = target(weight)
        size = max(1, CHUNK[kind] // weight.shape[1])
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            if kind == "cpu" and int(chosen[0]) >= len(weight):
                break  # all slots from here on are empty
            self._update_some(weight, state, chosen, gradient[start : start + size], group)

    def _update_some(
        self,
        weight: torch.Tensor,
        state: dict[str, torch.Tensor],
        chosen: torch.Tensor,
        gradient: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Update the rows ``chosen``, int64 ``[n]``, with their gradients ``[n, D]``.

        Empty slots, which come last, do what the first one does: both write the same. Where that is empty too, what is
        there is written. Each operation is rounded by itself, so that a row's bits do not depend on its place.
        """
        used, (beta1, beta2) = chosen < len(weight), group["betas"]
        rows = torch.where(used, chosen, chosen[0].clamp(max=len(weight) - 1))
        own = torch.arange(len(chosen), device=chosen.device).masked_fill_(~used, 0)
        keep = used[0] if self.found_inf is None else used[0] & (self.found_inf <= 0)
        gradient = gradient.index_select(0, own)
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        before = state[UPDATES].index_select(0, rows)
        count = (before + 1).double()
        rate = (group["lr"] / (1 - beta1**count)).float().unsqueeze(1)
        root = (1 - beta2**count).sqrt().float().unsqueeze(1)
        average = state["exp_avg"].index_select(0, rows).mul_(beta1).add_(gradient * (1 - beta1))
        square = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).add_(gradient.square_().mul_(1 - beta2))
        size = square.double().sqrt().float().div_(root).add_(group["eps"])  # adamw_update.py says why in double
        there = weight.index_select(0, rows)
        new = (there * (1 - group["lr"] * group["weight_decay"])).sub_(average.div(size).mul_(rate))
        weight.index_copy_(0, rows, torch.where(keep, new, there))
        for name, found in (("exp_avg", average), ("exp_avg_sq", square), (UPDATES, before + 1)):
            state[name].index_copy_(0, rows, torch.where(keep, found, state[name].index_select(0, rows)))


def row_adamw(
    section: Optimizer,
    groups: Sequence[dict[str, Any]],
    items: Mapping[str, RowOptimizer],
    touched: Mapping[torch.Tensor, TouchedRows],
) -> RowAdamW:
    """The row-wise AdamW of a resolved recipe; ``groups`` have the settings that the ``items`` of names leave open."""
    usual = section if isinstance(section, (AdamwOptimizer, MuonOptimizer)) else _DEFAULTS
    found = []
    for group in groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            item = items[name]
            own = {"lr": item.lr, "weight_decay": item.weight_decay}
            kept = {key: group[key] if value is None else value for key, value in own.items()}
            betas, eps = item.betas or usual.betas, item.eps or usual.eps
            found.append({"params": [parameter], "names": (name,), "betas": betas, "eps": eps, **kept})
    return RowAdamW(found, touched)
