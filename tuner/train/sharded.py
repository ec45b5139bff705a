"""Adafactor and Muon, whose updates need more of a parameter than its shard, without a read by the host."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tuner.config.optimizers import AdafactorOptimizer, MuonOptimizer
from tuner.parallel.fsdp import Layout, map_whole_matrices, sum_of_squares, sums_over_rows

SMALL_SQUARE = 1e-30
"""Added to squared gradients: the first epsilon of Adafactor's paper."""
SMALL_SCALE = 1e-3
"""Least root mean square of a parameter that learning rates are taken relative to: its second epsilon."""


class ShardedOptimizer(torch.optim.Optimizer):
    """What both have: layouts, and ``found_inf`` and ``grad_scale`` honoured as torch's fused optimizers do.

    Uses up gradients.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], layouts: Mapping[torch.Tensor, Layout]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
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
    rows, and root mean squares of whole parameters, are added up over the processes in two collectives a step.
    torch.optim.Adafactor refuses sharded tensors and asks the host for three numbers a parameter.
    """

    def __init__(
        self, groups: list[dict[str, Any]], layouts: Mapping[torch.Tensor, Layout], section: AdafactorOptimizer
    ) -> None:
        super().__init__(groups, layouts)
        self._section = section
        for group in self.param_groups:
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, **_moments(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        work, keep = self._work(), self._keep
        layouts = [self._layouts[p] for p, _, _ in work]
        sums_of_columns, whole = _column_sums([gradient for _, gradient, _ in work], layouts)
        columns = sums_over_rows(sums_of_columns, whole)
        for (parameter, gradient, _), layout, sums in zip(work, layouts, columns, strict=True):
            self._make_update(parameter, gradient, layout, sums, keep)
            if keep is not None:
                gradient.masked_fill_(~keep, 0.0)  # moments that have seen nothing divide by zero
        squares = [sum_of_squares([gradient]).float() for _, gradient, _ in work]
        if self._section.scale_parameter:
            squares += [sum_of_squares([parameter]).float() for parameter, _, _ in work]
            layouts = layouts * 2
        means = [s / layout.shape.numel() for s, layout in zip(sums_over_rows(squares, layouts), layouts, strict=True)]
        for number, (parameter, update, group) in enumerate(work):
            size = (means[number].sqrt() / self._section.clip_threshold).clamp_(min=1.0).reciprocal_()
            if self._section.scale_parameter:
                size *= means[len(work) + number].sqrt().clamp_(min=SMALL_SCALE)
            self._decay(parameter, group)
            parameter.addcmul_(update, size, value=-group["lr"])

    def _make_update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        layout: Layout,
        column_sums: torch.Tensor,
        keep: torch.Tensor | None,
    ) -> None:
        """Take a gradient into the moments, and divide it, in place, by the root of their estimate of its square."""
        state = self.state[parameter]
        state["step"] += 1 if keep is None else keep
        share = state["step"].clamp(min=1).pow(self._section.decay_rate)  # of the new squares: 1 - beta2
        if keep is not None:
            share = share * keep
        if gradient.ndim < 2:
            state["exp_avg_sq"].lerp_(gradient.square() + SMALL_SQUARE, share)
            gradient.mul_(state["exp_avg_sq"].rsqrt())
            return
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        squares = torch.linalg.vector_norm(gradient, dim=-1).square_()
        rows.lerp_(squares / layout.shape[-1] + SMALL_SQUARE, share)
        columns.lerp_(column_sums / layout.shape[-2] + SMALL_SQUARE, share)
        mean = columns.mean(dim=-1, keepdim=True)  # of all squares, as is the mean of all rows
        gradient.mul_((rows / mean).rsqrt_().unsqueeze(-1)).mul_(columns.rsqrt().unsqueeze(-2))


def _moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if parameter.ndim < 2:
        return {"exp_avg_sq": torch.zeros_like(parameter)}
    shape = parameter.shape
    return {
        "exp_avg_sq_row": parameter.new_zeros(shape[:-1]),
        "exp_avg_sq_col": parameter.new_zeros(*shape[:-2], shape[-1]),
    }


def _column_sums(
    gradients: Sequence[torch.Tensor], layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], list[Layout]]:
    """Sums of squares over this process's rows, and where they lie: those of stacks of matrices are whole already."""
    sums = [g.new_zeros(0) if g.ndim < 2 else torch.linalg.vector_norm(g, dim=-2).square_() for g in gradients]
    return sums, [layout if len(layout.shape) == 2 else Layout(layout.shape, None) for layout in layouts]


def moment_shape(moment: str, shape: torch.Size) -> tuple[torch.Size, bool]:
    """The whole shape of a moment of a whole parameter, and whether it is sharded where the parameter is."""
    if moment == "exp_avg_sq_row":
        return shape[:-1], True
    if moment == "exp_avg_sq_col":
        return torch.Size((*shape[:-2], shape[-1])), len(shape) > 2
    return shape, True


class ShardedMuon(ShardedOptimizer):
    """Muon (Jordan et al. 2024) as torch.optim.Muon takes its steps, on any number of processes.

    Each process holds rows of the matrices. Moments and weights need no others; the update, as torch casts it to bf16,
    is gathered matrix by matrix on the process whose turn it is, and torch's Muon makes it orthogonal there. On one
    process the result is torch's, bit for bit.
    """

    def __init__(
        self, groups: list[dict[str, Any]], layouts: Mapping[torch.Tensor, Layout], section: MuonOptimizer
    ) -> None:
        super().__init__(groups, layouts)
        self._section, self._orthogonal = section, _Orthogonal(section.ns_steps)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

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
        if keep is None:
            buffer.lerp_(gradient, 1 - momentum)
        else:
            buffer.lerp_(gradient, torch.where(keep, 1 - momentum, 0.0))
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
