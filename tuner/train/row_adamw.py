"""Embeddings of which a step updates the rows that it touches; all others, and their moments, keep their bits.

All processes agree on which rows there are and add up what each has of their gradients. A row's moments decay, and its
weights do, in the updates that touch it and in no others: nothing is caught up. Its bias is corrected by the number of
its own updates, not of the run's: after k of them its moments are averages of k gradients from zero, whose sum of
weights is 1 - beta^k. By the run's count a row whose token comes late would take its first step
(1 - beta1) / sqrt(1 - beta2) times as large as an early one. A row that every update touches is updated as by AdamW
(Loshchilov & Hutter 2019); with sparse gradients and without decay this is the lazy Adam of torch.optim.SparseAdam but
for that count.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tuner.config.optimizers import AdamwOptimizer, MuonOptimizer, Optimizer, RowOptimizer
from tuner.model.touched_rows import TouchedRows
from tuner.parallel.mesh import Mesh
from tuner.runtime.device import target, to_device
from tuner.train.moments import CHUNK, FlaggedOptimizer, zero_averages
from tuner.train.step_parts import StepForwards, StepPart


class RowGradients(StepPart):
    """Of embeddings by their parameters' names. A parameter that is here has no gradient of its own."""

    def __init__(self, touched: Mapping[str, TouchedRows], mesh: Mesh, device: torch.device) -> None:
        self._touched, self._mesh, self._device = dict(touched), mesh, device

    def owns(self, name: str) -> bool:
        """Of each embedding that is here."""
        return name in self._touched

    def before_forward(self, step: StepForwards) -> None:
        """Begin a step in which this process looks up the tokens of its batches."""
        self.begin(batch.input_ids for batch in step.batches.micro)

    def begin(self, input_ids: Iterable[npt.NDArray[np.int64]]) -> None:
        """Begin a step in which this process looks up these tokens. Collective where there are several processes.

        Raises ValueError for more of them than there is room for.
        """
        ids = np.concatenate([part.reshape(-1) for part in input_ids])
        for touched in self._touched.values():
            if len(ids) * self._mesh.data_size > touched.most:
                room = touched.most // self._mesh.data_size
                raise ValueError(f"{len(ids)} tokens are looked up in a step, and there is room for {room}")
            mask = np.zeros(touched.embedding.num_embeddings, dtype=np.uint8)
            mask[ids] = 1
            if (padding := touched.embedding.padding_idx) is not None:
                mask[padding] = 0  # its gradient is none's
            present = to_device(mask, self._device)
            if self._mesh.size > 1:
                dist.all_reduce(present, op=dist.ReduceOp.MAX)
            touched.begin(present)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add up what processes have of the same rows, once a step's backward passes are done. Collective.

        Those that hold other rows of one copy have added up all processes' gradients of them already.
        """
        if self._mesh.size == 1:
            return
        for touched in self._touched.values():
            gradient, weight = _gradient(touched), touched.embedding.weight
            if not isinstance(weight, DTensor):
                dist.all_reduce(gradient)
            elif weight.device_mesh.ndim > 1:
                dist.all_reduce(gradient, group=weight.device_mesh.get_group(0))

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients ``[room, D]`` of what the step touches, each row once; they lie as their parameters do."""
        return {name: _as_weight(touched) for name, touched in self._touched.items() if touched.rows is not None}

    def gradient_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Also what says which rows the gradients are of."""
        indices = ((name, index) for name, touched in self._touched.items() for index in touched.indices)
        return [*super().gradient_tensors(), *indices]


def _gradient(touched: TouchedRows) -> torch.Tensor:
    """The gradient by rows; zeros where no backward pass of this process got there."""
    if touched.gradient is None:
        weight = touched.embedding.weight
        touched.gradient = weight.new_zeros(touched.room, weight.shape[1], requires_grad=False)
    return touched.gradient


def _as_weight(touched: TouchedRows) -> torch.Tensor:
    gradient, weight = _gradient(touched), touched.embedding.weight
    if not isinstance(weight, DTensor):
        return gradient
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)


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
            self.state[parameter] = {**zero_averages(parameter), UPDATES: parameter.new_zeros(len(parameter))}

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
        self, weight: torch.Tensor, state: dict[str, torch.Tensor], chosen: torch.Tensor, gradient: torch.Tensor,
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
        size = square.double().sqrt().float().div_(root).add_(group["eps"])  # compact_adamw.py says why in double
        there = weight.index_select(0, rows)
        new = (there * (1 - group["lr"] * group["weight_decay"])).sub_(average.div(size).mul_(rate))
        weight.index_copy_(0, rows, torch.where(keep, new, there))
        for name, found in (("exp_avg", average), ("exp_avg_sq", square), (UPDATES, before + 1)):
            state[name].index_copy_(0, rows, torch.where(keep, found, state[name].index_select(0, rows)))


def row_adamw(
    section: Optimizer, groups: Sequence[dict[str, Any]], items: Mapping[str, RowOptimizer],
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
