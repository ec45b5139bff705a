"""Muon on matrices that may be sharded: momentum by shard, orthogonal updates of whole matrices."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from tuner.parallel.shards import Layout, map_whole_matrices


class ShardedMuon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) as torch.optim.Muon takes its steps, on any number of processes.

    Each process holds rows of the matrices. Moments and weights need no others; the update, as torch casts it to bf16,
    is gathered matrix by matrix on the process whose turn it is, and torch's Muon makes it orthogonal there. On one
    process the result is torch's, bit for bit. Honours ``found_inf`` and ``grad_scale`` as torch's fused optimizers do.
    Uses up gradients.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        layouts: Mapping[torch.Tensor, Layout],
        adjust_lr: Literal["match_rms_adamw", "original"],
        momentum: float,
        nesterov: bool,
        ns_steps: int,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._layouts, self._momentum, self._nesterov = layouts, momentum, nesterov
        self._orthogonal = _Orthogonal(ns_steps)
        self._match_rms = adjust_lr == "match_rms_adamw"
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        work = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        keep = None if self.found_inf is None else self.found_inf <= 0
        updates = [self._update(self.state[p]["momentum_buffer"], gradient, keep) for p, gradient, _ in work]
        layouts = [self._layouts[p] for p, _, _ in work]
        orthogonal = map_whole_matrices(self._orthogonal, updates, layouts)
        for (parameter, _, group), update, layout in zip(work, orthogonal, layouts, strict=True):
            lr, decay = group["lr"], group["lr"] * group["weight_decay"]
            if keep is not None:
                update.mul_(keep)
                parameter.mul_(torch.where(keep, 1 - decay, 1.0))
            else:
                parameter.mul_(1 - decay)
            rows, columns = layout.shape
            parameter.add_(update, alpha=-lr * self._ratio(rows, columns))

    def _ratio(self, rows: int, columns: int) -> float:
        """What a matrix's shape makes of the learning rate (Liu et al. 2025, or Jordan's own)."""
        return 0.2 * math.sqrt(max(rows, columns)) if self._match_rms else math.sqrt(max(1, rows / columns))

    def _update(self, buffer: torch.Tensor, gradient: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """Take a gradient into the momentum; return what is to be made orthogonal, in bf16."""
        prepare(gradient, self.grad_scale, keep)
        if keep is None:
            buffer.lerp_(gradient, 1 - self._momentum)
        else:
            buffer.lerp_(gradient, torch.where(keep, 1 - self._momentum, 0.0))
        return (gradient.lerp_(buffer, self._momentum) if self._nesterov else buffer).to(torch.bfloat16, copy=True)


def prepare(gradient: torch.Tensor, divisor: torch.Tensor | None, keep: torch.Tensor | None) -> None:
    """Divide a gradient, in place; where ``keep`` is false it is made 0, whatever was in it."""
    if divisor is not None:
        gradient.div_(divisor)
    if keep is not None:
        gradient.masked_fill_(~keep, 0.0)


class _Orthogonal:
    """What torch's Muon subtracts from a matrix at a learning rate of 1, asked of torch's Muon itself."""

    def __init__(self, ns_steps: int) -> None:
        self._scratch = nn.Parameter(torch.zeros(1, 1))
        self._muon = torch.optim.Muon(
            [self._scratch], 1.0, 0.0, momentum=0.0, nesterov=False, ns_steps=ns_steps, adjust_lr_fn="original"
        )

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """The nearly orthogonal matrix, in bf16."""
        tall = matrix.shape[0] > matrix.shape[1]
        wide = matrix.T if tall else matrix  # torch turns tall ones itself, and would scale them by their shape
        self._muon.state.clear()
        self._scratch.data = torch.zeros_like(wide)
        self._scratch.grad = wide
        self._muon.step()
        result = self._scratch.data.neg_()
        self._scratch.data, self._scratch.grad = matrix.new_zeros(1, 1), None
        return result.T if tall else result
