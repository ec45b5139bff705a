"""Adafactor on tensors that may be sharded, without a read by the host."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tuner.parallel.shards import Layout, sums_over_rows
from tuner.train.muon import prepare
from tuner.train.norm import sum_of_squares

SMALL_SQUARE = 1e-30
"""Added to squared gradients: the paper's first epsilon."""
SMALL_SCALE = 1e-3
"""Least root mean square of a parameter that learning rates are taken relative to: its second epsilon."""


class ShardedAdafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018) without first moments, at the learning rates of a schedule.

    The second moments of a tensor of two or more dimensions are its mean over columns and its mean over rows; sums over
    rows, and root mean squares of whole parameters, are added up over the processes in two collectives a step.
    torch.optim.Adafactor refuses sharded tensors and asks the host for three numbers a parameter. Honours ``found_inf``
    and ``grad_scale`` as torch's fused optimizers do. Uses up gradients.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        layouts: Mapping[torch.Tensor, Layout],
        decay_rate: float,
        clip_threshold: float,
        scale_parameter: bool,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._layouts, self._decay_rate = layouts, decay_rate
        self._clip_threshold, self._scale_parameter = clip_threshold, scale_parameter
        for group in self.param_groups:
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step, **_moments(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        work = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        layouts = [self._layouts[p] for p, _, _ in work]
        keep = None if self.found_inf is None else self.found_inf <= 0
        for _, gradient, _ in work:
            prepare(gradient, self.grad_scale, keep)
        sums_of_columns, whole = _column_sums([gradient for _, gradient, _ in work], layouts)
        columns = sums_over_rows(sums_of_columns, whole)
        for (parameter, gradient, _), layout, sums in zip(work, layouts, columns, strict=True):
            self._make_update(parameter, gradient, layout, sums, keep)
            if keep is not None:
                gradient.masked_fill_(~keep, 0.0)  # moments that have seen nothing divide by zero
        squares = [sum_of_squares([gradient]).float() for _, gradient, _ in work]
        if self._scale_parameter:
            squares += [sum_of_squares([parameter]).float() for parameter, _, _ in work]
            layouts = layouts * 2
        means = [s / layout.shape.numel() for s, layout in zip(sums_over_rows(squares, layouts), layouts, strict=True)]
        for number, (parameter, update, group) in enumerate(work):
            size = (means[number].sqrt() / self._clip_threshold).clamp_(min=1.0).reciprocal_()
            if self._scale_parameter:
                size *= means[len(work) + number].sqrt().clamp_(min=SMALL_SCALE)
            decay = group["lr"] * group["weight_decay"]
            parameter.mul_(1 - decay if keep is None else torch.where(keep, 1 - decay, 1.0))
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
        share = state["step"].clamp(min=1).pow(self._decay_rate)  # of the new squares: 1 - beta2
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
