"""Adafactor and Muon, whose updates need more of a parameter than its shard, without a read by the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuner.config.optimizers import AdafactorOptimizer, MuonOptimizer
from tuner.parallel.fsdp import sum_of_squares
from tuner.parallel.layouts import Layouts, ShardLayout, added_up, map_whole_matrices
from tuner.train.moments import FlaggedOptimizer, zeros_like

SMALL_SQUARE = 1e-30
"""Added to squared gradients: the first epsilon of Adafactor's paper."""
SMALL_SCALE = 1e-3
"""Least root mean square of a parameter that learning rates are taken relative to: its second epsilon."""


class ShardedOptimizer(FlaggedOptimizer):
    """What both have: layouts, and gradients that a step uses up."""

    def __init__(self, groups: list[dict[str, Any]], layouts: Layouts) -> None:
        super().__init__(groups)
        self._layouts = layouts
        self._keep: torch.Tensor | None = None
        """Of the newest step: false where it is left out."""

    def _work(self) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """Parameters with their gradients and groups: gradients are divided, and zeros in a step that is left out."""
        work = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._keep = None if self.found_inf is None else self.found_inf <= 0
        for _, gradient, _ in work:
            if self.grad_scale is not None:
                gradient.div_(self.grad_scale)
            if self._keep is not None:
                gradient.masked_fill_(~self._keep, 0.0)
        return work

    def _decay(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        kept = 1 - group["lr"] * group["weight_decay"]
        parameter.mul_(kept if self._keep is None else torch.where(self._keep, kept, 1.0))


class ShardedAdafactor(ShardedOptimizer):
    """Adafactor (Shazeer & Stern 2018) without first moments, at the learning rates of a schedule.

    The second moments of a tensor of two or more dimensions are its mean over columns and its mean over rows; sums over
    rows, and root mean squares of whole parameters, are added up over the processes in two collectives a step. Where
    columns are split, sums over columns are too, and the mean of all squares.
    torch.optim.Adafactor refuses sharded tensors and asks the host for three numbers a parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], layouts: Layouts, section: AdafactorOptimizer) -> None:
        super().__init__(groups, layouts)
        self._section = section
        for parameter in self.parameters:
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = {"step": step, **_moments(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        work = self._work()
        layouts = [self._layouts[p] for p, _, _ in work]
        columns = [number for number, (_, gradient, _) in enumerate(work) if gradient.ndim > 1]
        matrices = [_Squares.of(work[number][1], layouts[number]) for number in columns]
        found = dict(zip(columns, _added_up(matrices), strict=True))
        for number, (parameter, gradient, _) in enumerate(work):
            self._take_squares(parameter, gradient, found.get(number))
        means = self._means([work[number][0] for number in columns], [layouts[number] for number in columns])
        for parameter, gradient, _ in work:
            self._make_update(parameter, gradient, means)
            if self._keep is not None:
                gradient.masked_fill_(~self._keep, 0.0)  # moments that have seen nothing divide by zero
        squares = [sum_of_squares([gradient]).float() for _, gradient, _ in work]
        if self._section.scale_parameter:
            squares += [sum_of_squares([parameter]).float() for parameter, _, _ in work]
            layouts = layouts * 2
        parts = zip(added_up(squares, layouts), layouts, strict=True)
        sizes = [one / layout.shape.numel() for one, layout in parts]
        for number, (parameter, update, group) in enumerate(work):
            size = (sizes[number].sqrt() / self._section.clip_threshold).clamp_(min=1.0).reciprocal_()
            if self._section.scale_parameter:
                size *= sizes[len(work) + number].sqrt().clamp_(min=SMALL_SCALE)
            self._decay(parameter, group)
            parameter.addcmul_(update, size, value=-group["lr"])

    def _take_squares(self, parameter: torch.Tensor, gradient: torch.Tensor, squares: _Squares | None) -> None:
        """Take the squares of a gradient into the moments."""
        state, keep = self.state[parameter], self._keep
        state["step"] += 1 if keep is None else keep
        share = state["step"].clamp(min=1).pow(self._section.decay_rate)  # of the new squares: 1 - beta2
        if keep is not None:
            share = share * keep
        if squares is None:
            state["exp_avg_sq"].lerp_(gradient.square() + SMALL_SQUARE, share)
            return
        shape = squares.layout.shape
        state["exp_avg_sq_row"].lerp_(squares.of_rows / shape[-1] + SMALL_SQUARE, share)
        state["exp_avg_sq_col"].lerp_(squares.of_columns / shape[-2] + SMALL_SQUARE, share)

    def _means(
        self, parameters: Sequence[torch.Tensor], layouts: Sequence[ShardLayout]
    ) -> Mapping[torch.Tensor, torch.Tensor]:
        """The mean of all squares of each matrix ``[..., 1]``: that of its columns, as of its rows."""
        columns = [self.state[parameter]["exp_avg_sq_col"] for parameter in parameters]
        found = {p: own.mean(dim=-1, keepdim=True) for p, own in zip(parameters, columns, strict=True)}
        lasts = [len(layout.shape) - 1 for layout in layouts]
        split = [n for n, one in enumerate(layouts) if any(cut.dim == lasts[n] for cut in one.splits)]
        sums, of = [columns[number].sum(dim=-1, keepdim=True) for number in split], [layouts[n] for n in split]
        for number, total in zip(split, added_up(sums, of, [len(one.shape) - 1 for one in of]), strict=True):
            found[parameters[number]] = total / layouts[number].shape[-1]
        return found

    def _make_update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, means: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Divide a gradient, in place, by the root of the moments' estimate of its square."""
        state = self.state[parameter]
        if gradient.ndim < 2:
            gradient.mul_(state["exp_avg_sq"].rsqrt())
            return
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        gradient.mul_((rows / means[parameter]).rsqrt_().unsqueeze(-1)).mul_(columns.rsqrt().unsqueeze(-2))


@dataclass(frozen=True)
class _Squares:
    """Sums of a matrix's squares, of those that a process has or of all: ``[..., M]`` over rows, ``[..., N]``."""

    layout: ShardLayout
    of_rows: torch.Tensor
    of_columns: torch.Tensor

    @staticmethod
    def of(gradient: torch.Tensor, layout: ShardLayout) -> _Squares:
        """Those of this process."""
        rows, columns = (torch.linalg.vector_norm(gradient, dim=dim).square_() for dim in (-1, -2))
        return _Squares(layout, rows, columns)


def _added_up(squares: Sequence[_Squares]) -> list[_Squares]:
    """The sums over whole rows and columns. Collective where these are split."""
    layouts = [one.layout for one in squares]
    dims = [len(layout.shape) - 1 for layout in layouts] + [len(layout.shape) - 2 for layout in layouts]
    sums = added_up([*(one.of_rows for one in squares), *(one.of_columns for one in squares)], layouts * 2, dims)
    pairs = zip(layouts, sums[: len(layouts)], sums[len(layouts) :], strict=True)
    return [_Squares(layout, rows, columns) for layout, rows, columns in pairs]


def _moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.ndim < 2:
        return {"exp_avg_sq": torch.zeros_like(parameter)}
    shape = parameter.shape
    rows, columns = parameter.new_zeros(shape[:-1]), parameter.new_zeros(*shape[:-2], shape[-1])
    return {"exp_avg_sq_row": rows, "exp_avg_sq_col": columns}


class ShardedMuon(ShardedOptimizer):
    """Muon (Jordan et al. 2024) as torch.optim.Muon takes its steps, on any number of processes.

    Each process holds a part of the matrices. Moments and weights need no others; the update, as torch casts it to
    bf16, is gathered matrix by matrix on the process whose turn it is, and torch's Muon makes it orthogonal there. On
    one process the result is torch's, bit for bit.
    """

    def __init__(self, groups: list[dict[str, Any]], layouts: Layouts, section: MuonOptimizer) -> None:
        super().__init__(groups, layouts)
        self._section, self._orthogonal = section, _Orthogonal(section.ns_steps)
        for parameter in self.parameters:
            self.state[parameter]["momentum_buffer"] = zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        work, keep = self._work(), self._keep
        updates = [self._update(self.state[p]["momentum_buffer"], gradient, keep) for p, gradient, _ in work]
        layouts = [self._layouts[p] for p, _, _ in work]
        orthogonal = map_whole_matrices(self._orthogonal, updates, layouts)
        for (parameter, _, group), update, layout in zip(work, orthogonal, layouts, strict=True):
            if keep is not None:
                update.mul_(keep)
            self._decay(parameter, group)
            rows, columns = layout.shape
            parameter.add_(update, alpha=-group["lr"] * self._ratio(rows, columns))

    def _ratio(self, rows: int, columns: int) -> float:
        """What a matrix's shape makes of the learning rate (Liu et al. 2025, or Jordan's own)."""
        if self._section.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    def _update(self, buffer: torch.Tensor, gradient: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """Take a gradient into the momentum; return what is to be made orthogonal, in bf16."""
        momentum = self._section.momentum
        buffer.lerp_(gradient, 1 - momentum if keep is None else torch.where(keep, 1 - momentum, 0.0))
        return (gradient.lerp_(buffer, momentum) if self._section.nesterov else buffer).to(torch.bfloat16, copy=True)


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
