"""AdamW with moments in 8 bits (Dettmers et al. 2022) or of bf16 weights, whose updates are rounded stochastically.

The state of a matrix is as many plain tensors that lie over the processes as the matrix does, and nothing in an update
depends on which process holds which rows, or which columns: runs are saved, resharded and resumed bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from tuner.config.optimizers import AdamwOptimizer
from tuner.errors import RecipeError
from tuner.parallel.layouts import ShardLayout
from tuner.runtime.parts import Box
from tuner.train import moments
from tuner.train.adamw_update import LANES, name_keys, step_keys, update


class CompactAdamW(moments.FlaggedOptimizer):
    """Its parameters are a process's parts as plain tensors; ``coded`` are those whose moments have 8 bits.

    All parameters have one count of updates. ``seed`` is of the rounding. Raises RecipeError for a parameter whose rows
    are split where its blocks, or the random numbers for it, are not.
    """

    def __init__(
        self, groups: list[dict[str, Any]], layouts: Mapping[torch.Tensor, ShardLayout], coded: Set[torch.Tensor],
        section: AdamwOptimizer, seed: int,
    ) -> None:
        super().__init__(groups)
        self._section = section
        parameters = self.parameters
        names = [name for group in self.param_groups for name in group["names"]]
        device = parameters[0].device
        self._maps = moments.code_map(True, device), moments.code_map(False, device)
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self._keys: torch.Tensor | None = None
        if section.rounding == "stochastic":
            self._keys = moments.placed(name_keys(seed, names), torch.int64, device)
        self._pieces: dict[torch.Tensor, list[_Piece]] = {}
        for name, parameter in zip(names, parameters, strict=True):
            unit = moments.BLOCK if parameter in coded else LANES
            self._pieces[parameter] = _pieces(name, layouts[parameter], unit)
            is_coded = parameter in coded
            state = _coded(parameter, self._maps) if is_coded else moments.zero_averages(parameter, torch.float32)
            self.state[parameter] = {"step": self._step, **state}
        (beta1, beta2), at = section.betas, moments.At
        fixed = {at.BETA1: beta1, at.REST1: 1 - beta1, at.BETA2: beta2, at.REST2: 1 - beta2, at.EPSILON: section.eps}
        numbers = [fixed.get(place, 1.0) for place in at]
        self._numbers = [moments.placed(numbers, torch.float32, device) for _ in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; no closure."""
        self._step += 1.0 if self.found_inf is None else (self.found_inf <= 0).float()
        keys = None if self._keys is None else step_keys(self._keys, self._step)
        average_codes, square_codes = self._maps
        number = 0
        for group, numbers in zip(self.param_groups, self._numbers, strict=True):
            self._prepare(group, numbers)
            step = moments.Step(numbers, average_codes, square_codes, self.found_inf)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = None if keys is None or parameter.dtype == torch.float32 else keys[number]
                    for piece in self._pieces[parameter]:
                        update(self._part(parameter, piece, key), step)
                number += 1

    def _prepare(self, group: dict[str, Any], numbers: torch.Tensor) -> None:
        """Put what this step's update is computed with into its place."""
        beta1, beta2 = self._section.betas
        count = self._step.double().clamp(min=1)  # 0 before an update was made, of which nothing is kept
        if self.grad_scale is None:
            numbers[moments.At.DIVISOR].fill_(1.0)
        else:
            numbers[moments.At.DIVISOR].copy_(self.grad_scale)
        numbers[moments.At.DECAY].fill_(1 - group["lr"] * group["weight_decay"])
        numbers[moments.At.RATE].copy_(group["lr"] / (1 - beta1**count))
        numbers[moments.At.ROOT].copy_((1 - beta2**count).sqrt())

    def _part(self, parameter: torch.Tensor, piece: _Piece, key: torch.Tensor | None) -> moments.MomentPart:
        """Rows of a parameter that lie together, of its gradient and of its moments."""
        state, gradient, own = self.state[parameter], parameter.grad, piece.rows
        assert gradient is not None, "the caller has looked"
        assert (key is None) == (parameter.dtype == torch.float32), "bf16 weights need stochastic rounding"
        shape = moments.rows_of(parameter.shape)
        average, square = (
            moments.Moment(state[name].view(shape)[own], None)
            if name in state
            else moments.Moment(state[f"{name}_codes"].view(shape)[own], state[f"{name}_scales"][own])
            for name in moments.AVERAGES
        )
        weight = parameter.detach().view(shape)[own]
        numbers = gradient.contiguous().view(shape)[own]
        return moments.MomentPart(
            numbers, weight, average, square, piece.first_row, key, piece.first_column, piece.whole_width
        )


@dataclass(frozen=True)
class _Piece:
    """Rows of a process's part of a parameter that lie together in the whole, and where: as a :class:`MomentPart`."""

    rows: slice
    first_row: int
    first_column: int
    whole_width: int


def _pieces(name: str, layout: ShardLayout, unit: int) -> list[_Piece]:
    """What a process has of a parameter, whose rows may be cut at multiples of ``unit`` numbers alone.

    Raises RecipeError where they are cut elsewhere, on any process.
    """
    width = moments.rows_of(layout.shape)[1]
    for part in layout.parts:
        for box in part.boxes:
            columns = _columns(box, layout.shape) if box.sizes[1:] == part.shape[1:] else None
            if columns is None or columns.start % unit or (columns.stop % unit and columns.stop != width):
                by_chance = "random numbers of optimizer.rounding: stochastic"
                what = "blocks of 8-bit states" if unit == moments.BLOCK else by_chance
                raise RecipeError(
                    f"{name}: its rows of {width:,} numbers are split where the {what} are not, at other numbers than "
                    f"multiples of {unit}",
                    hint="write optimizer.state: fp32"
                    if unit == moments.BLOCK
                    else "write optimizer.rounding: nearest, or take fewer processes for parallel.tensor",
                )
    found = []
    for box in layout.own.boxes:
        rows, columns = slice(0, 1), _columns(box, layout.shape)
        if layout.shape:
            rows = slice(box.at[0], box.at[0] + box.sizes[0])
        assert columns is not None, "all parts have been looked at"
        found.append(_Piece(rows, box.offsets[0] if layout.shape else 0, columns.start, width))
    return found


def _columns(box: Box, shape: torch.Size) -> range | None:
    """Which numbers of its rows a box has, None where they do not lie together: one dimension alone may be split."""
    start, count, inner = 0, 1, 1
    for dim in reversed(range(1, len(shape))):
        if count != inner and box.sizes[dim] > 1:
            return None
        start, count, inner = start + box.offsets[dim] * inner, count * box.sizes[dim], inner * shape[dim]
    return range(start, start + count)


def _coded(parameter: torch.Tensor, maps: tuple[moments.CodeMap, moments.CodeMap]) -> dict[str, torch.Tensor]:
    found = {}
    for name, codes in zip(moments.AVERAGES, maps, strict=True):
        found[f"{name}_codes"] = torch.full(parameter.shape, codes.zero, dtype=torch.uint8, device=parameter.device)
        found[f"{name}_scales"] = torch.zeros(moments.scales_shape(parameter.shape), device=parameter.device)
    return found
