"""AdamW with moments in 8 bits (Dettmers et al. 2022) or of bf16 weights, whose updates are rounded by chance.

The state of a matrix is as many plain tensors that lie over the processes by rows, as the matrix does, and nothing in
an update depends on which process holds which rows: runs are saved, resharded and resumed bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch

from tuner.config.optimizers import AdamwOptimizer
from tuner.parallel.fsdp import Layout
from tuner.train.adamw_parts import (
    BETA1,
    BETA2,
    DECAY,
    DIVISOR,
    EPSILON,
    RATE,
    REST1,
    REST2,
    ROOT,
    Moment,
    Part,
    Step,
)
from tuner.train.adamw_update import update
from tuner.train.moment_codes import CodeMap, code_map, placed, rows_of, scales_shape
from tuner.train.stochastic import name_keys, step_keys

MOMENTS = ("exp_avg", "exp_avg_sq")


class CompactAdamW(torch.optim.Optimizer):
    """Its parameters are a process's parts as plain tensors; ``coded`` are those whose moments have 8 bits.

    ``found_inf`` and ``grad_scale`` are honoured on the device, as torch's fused optimizers do. All parameters have one
    count of updates. ``seed`` is of the rounding.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layouts: Mapping[torch.Tensor, Layout],
        coded: Set[torch.Tensor],
        section: AdamwOptimizer,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._layouts, self._section = layouts, section
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        names = [name for group in self.param_groups for name in group["names"]]
        device = parameters[0].device
        self._maps = code_map(True, device), code_map(False, device)
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self._keys: torch.Tensor | None = None
        if section.rounding == "stochastic":
            self._keys = placed(name_keys(seed, names), torch.int64, device)
        for parameter in parameters:
            state = _coded(parameter, self._maps) if parameter in coded else _numbers(parameter)
            self.state[parameter] = {"step": self._step, **state}
        beta1, beta2 = section.betas
        fixed = {BETA1: beta1, REST1: 1 - beta1, BETA2: beta2, REST2: 1 - beta2, EPSILON: section.eps}
        numbers = [fixed.get(place, 1.0) for place in range(9)]
        self._numbers = [placed(numbers, torch.float32, device) for _ in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        self._step += 1.0 if self.found_inf is None else (self.found_inf <= 0).float()
        keys = None if self._keys is None else step_keys(self._keys, self._step)
        average_codes, square_codes = self._maps
        number = 0
        for group, numbers in zip(self.param_groups, self._numbers, strict=True):
            self._prepare(group, numbers)
            step = Step(numbers, average_codes, square_codes, self.found_inf)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = None if keys is None or parameter.dtype == torch.float32 else keys[number]
                    update(self._part(parameter, key), step)
                number += 1

    def _prepare(self, group: dict[str, Any], numbers: torch.Tensor) -> None:
        """Put what this step's update is computed with into its place."""
        beta1, beta2 = self._section.betas
        count = self._step.double().clamp(min=1)  # 0 before an update was made, of which nothing is kept
        if self.grad_scale is None:
            numbers[DIVISOR].fill_(1.0)
        else:
            numbers[DIVISOR].copy_(self.grad_scale)
        numbers[DECAY].fill_(1 - group["lr"] * group["weight_decay"])
        numbers[RATE].copy_(group["lr"] / (1 - beta1**count))
        numbers[ROOT].copy_((1 - beta2**count).sqrt())

    def _part(self, parameter: torch.Tensor, key: torch.Tensor | None) -> Part:
        """A parameter, its gradient and its moments as rows."""
        state, layout, gradient = self.state[parameter], self._layouts[parameter], parameter.grad
        assert gradient is not None, "the caller has looked"
        assert (key is None) == (parameter.dtype == torch.float32), "bf16 weights are trained by chance alone"
        shape = (parameter.shape[0] if parameter.ndim else 1, rows_of(layout.shape)[1])
        average, square = (
            Moment(state[name].view(shape), None)
            if name in state
            else Moment(state[f"{name}_codes"].view(shape), state[f"{name}_scales"])
            for name in MOMENTS
        )
        weight = parameter.detach().view(shape)
        return Part(gradient.contiguous().view(shape), weight, average, square, layout.first_row, key)


def _coded(parameter: torch.Tensor, maps: tuple[CodeMap, CodeMap]) -> dict[str, torch.Tensor]:
    found = {}
    for name, codes in zip(MOMENTS, maps, strict=True):
        found[f"{name}_codes"] = torch.full(parameter.shape, codes.zero, dtype=torch.uint8, device=parameter.device)
        found[f"{name}_scales"] = torch.zeros(scales_shape(parameter.shape), device=parameter.device)
    return found


def _numbers(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device) for name in MOMENTS}
