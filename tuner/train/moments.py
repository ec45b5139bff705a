"""What optimizers keep between steps: zeros that take no memory at first, or numbers in 8 bits, block by block.

The code book is the dynamic map of Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861).

A block is up to 256 neighbours of one row, where a row is what one index of the first dimension means. So a process
that holds rows holds whole blocks: codes and scales are cut, sent and put together by rows at any number of processes,
and nothing is ever quantised again. A block's scale is its largest magnitude; a code is the nearest of 256 values from
-1 to 1, or from 0 to 1: over seven decades, with the fewer digits the smaller they are.

Where a number is not negative (a second moment), only zero itself becomes zero: what it divides would be thrown far off
by a zero in place of a small number (Li et al. 2023, https://arxiv.org/abs/2309.01507).
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

BLOCK = 256
LEAST_NUMBERS, LEAST_WIDTH = 4096, 16
"""Numbers of a matrix, and of a row, from which on its moments are coded: below, scales take what codes save."""
_DECADES = 7
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Numbers that plain torch takes at a time: about 80 bytes of temporary memory each."""
_LEAST_EXPONENT = -24
"""All numbers below 2 to this power have the code of zero, or of the smallest value."""
CELL_BITS = 16
"""A cell is the numbers whose upper 16 bits are the same: as fine as bfloat16, finer than the values anywhere."""
NO_BOUND = 1 << CELL_BITS


@dataclass(frozen=True)
class CodeMap:
    """The values of 256 codes, and what is needed to find the nearest one; tensors lie on one device.

    ``bounds[rank]`` is the least magnitude that is nearer to that of the next rank. ``cells`` are for the kernels: for
    each cell from ``FIRST_CELL`` on the rank of its least magnitude, times 2^17, and the lower 16 bits of the one bound
    that may lie in it, or 2^16 where there is none. So one look finds the code of a number.
    """

    values: torch.Tensor
    bounds: torch.Tensor
    cells: torch.Tensor
    signed: bool

    @property
    def zero(self) -> int:
        """The code of zero; ranks of positive numbers are counted up from it, those of negative ones down."""
        return 127 if self.signed else 0


FIRST_CELL = (127 + _LEAST_EXPONENT) << (23 - CELL_BITS)
"""The upper bits of the least number of the first cell."""
LAST_CELL = 127 << (23 - CELL_BITS)
"""Those of 1."""


def code_map(signed: bool, device: torch.device) -> CodeMap:
    """The map for numbers of both signs, or for those that are not negative."""
    *numbers, cells = _tables(signed)
    values, bounds = (placed(each, torch.float32, device) for each in numbers)
    return CodeMap(values, bounds, placed(cells, torch.int32, device), signed)


def placed(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers in memory of the device, allocated as a prediction sees it."""
    return torch.empty(len(numbers), dtype=dtype, device=device).copy_(torch.tensor(numbers, dtype=dtype))


@cache
def _tables(signed: bool) -> tuple[list[float], list[float], list[int]]:
    """Values, bounds and cells as numbers: tensors are not kept here, since a prediction's are no real ones."""
    magnitudes = _magnitudes(signed)
    values = np.concatenate([-magnitudes[127:0:-1], magnitudes]) if signed else magnitudes
    bounds = ((magnitudes[:-1].astype(np.float64) + magnitudes[1:]) / 2).astype(np.float32)
    starts = np.arange(FIRST_CELL, LAST_CELL + 1, dtype=np.uint32) << CELL_BITS
    starts[0] = 0
    ranks = np.searchsorted(bounds, starts.view(np.float32), side="right")
    within = {int(bits) >> CELL_BITS: int(bits) % NO_BOUND for bits in bounds.view(np.uint32)}
    cells = [rank * 2 * NO_BOUND + (within.get(FIRST_CELL + n) or NO_BOUND) for n, rank in enumerate(ranks.tolist())]
    return values.tolist(), bounds.tolist(), cells


def _magnitudes(signed: bool) -> npt.NDArray[np.float32]:
    """Zero, the middles of equal parts of seven decades, twice as many in each as in the one below, and 1."""
    found = [0.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        found += [(0.1 + 0.9 * (part + 0.5) / parts) / 10 ** (_DECADES - 1 - decade) for part in range(parts)]
    return np.array([*found, 1.0], dtype=np.float32)


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows of a tensor of this shape, and numbers of each."""
    return shape[0] if len(shape) else 1, math.prod(shape[1:])


def scales_shape(shape: Sequence[int]) -> torch.Size:
    """The shape of the scales of a tensor of this shape: rows, and blocks of each."""
    rows, width = rows_of(shape)
    return torch.Size((rows, -(-width // BLOCK)))


def encode(numbers: torch.Tensor, codes: CodeMap) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 ``[rows, width]`` and scales float32 ``[rows, blocks]`` of float32 numbers ``[rows, width]``.

    A block with a number that is none, or infinite, is no number as a whole.
    """
    rows, width = numbers.shape
    padded = functional.pad(numbers, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    magnitudes = padded.abs()
    scales = magnitudes.amax(dim=-1)
    shares = magnitudes / torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    ranks = torch.bucketize(shares, codes.bounds, right=True, out_int32=True)
    if codes.signed:
        found = torch.where(padded < 0, codes.zero - ranks.clamp(max=codes.zero), codes.zero + ranks)
    else:
        found = torch.where(padded > 0, ranks.clamp(min=1), ranks)
    return found.view(rows, -1)[:, :width].to(torch.uint8), scales


def decode(coded: torch.Tensor, scales: torch.Tensor, codes: CodeMap) -> torch.Tensor:
    """The numbers, float32 ``[rows, width]``, of codes and scales of that many rows and blocks."""
    width = coded.shape[1]
    return codes.values[coded.int()] * scales.repeat_interleave(BLOCK, dim=1)[:, :width]


# What a step of AdamW works on: a process's part of one parameter, and the numbers of the step.

class At(IntEnum):
    """Where the numbers of a step are in :attr:`Step.numbers`; the kernels in C and Triton read them there, too.

    What gradients are divided by; what is left of a weight; the shares of a moment and of what is new in it; the
    learning rate over the first correction of the bias, the root of the second; what is added to the divisor.
    """

    DIVISOR, DECAY, BETA1, REST1, BETA2, REST2, RATE, ROOT, EPSILON = range(9)


@dataclass(frozen=True)
class Moment:
    """A running average ``[rows, width]``: float32 numbers, or codes and their blocks' scales ``[rows, blocks]``."""

    numbers: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True)
class MomentPart:
    """What a step works on: rows of a parameter, or columns of rows, all ``[rows, width]``, changed in place.

    ``first_row`` and ``first_column``, a multiple of 4, are the first of them in the whole parameter, whose rows have
    ``whole_width`` numbers; without it, as many as here. Weights are bf16 and rounded stochastically with a ``key``, an
    int64 scalar, and float32 without.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    average: Moment
    square: Moment
    first_row: int = 0
    key: torch.Tensor | None = None
    first_column: int = 0
    whole_width: int | None = None

    def arguments(self, step: "Step") -> dict[str, Any]:
        """What kernels are given, by the names of their arguments; None for what is not there."""
        width = self.weight.shape[1]
        found: dict[str, Any] = {"gradient": self.gradient, "weight": self.weight, "key": self.key}
        found |= {"numbers": step.numbers, "bad": step.bad, "width": width, "whole_width": self.whole_width or width}
        found |= {"first_row": self.first_row, "first_column": self.first_column}
        moments = (("average", self.average, step.average_codes), ("square", self.square, step.square_codes))
        for name, moment, codes in moments:
            found |= {name: moment.numbers, f"{name}_scales": moment.scales}
            found |= {f"{name}_values": codes.values, f"{name}_cells": codes.cells}
        return found


@dataclass(frozen=True)
class Step:
    """What the parameters of a group share: numbers, float32 ``[9]``, and the maps of first and second moments.

    Where ``bad``, a float32 scalar, is above 0, nothing changes.
    """

    numbers: torch.Tensor
    average_codes: CodeMap
    square_codes: CodeMap
    bad: torch.Tensor | None


class FlaggedOptimizer(torch.optim.Optimizer):
    """An optimizer of ours. ``found_inf`` and ``grad_scale`` are scalars on the device, as torch's GradScaler has them.

    Where the first is above 0, weights and state stay as they are; the second is what gradients are divided by. No step
    waits for the device to read them, but that of an optimizer on the host.
    """

    found_inf: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of all groups, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]


# State of zeros, for which the host gives no memory before it is written.

AVERAGES = ("exp_avg", "exp_avg_sq")
"""The moments of AdamW, by the names that torch's has."""

SMALL = 1 << 16
"""Bytes below which a mapping of its own costs more than writing zeros."""


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros of a tensor's shape, device and, unless another is given, type.

    On the CPU they are a private mapping of no file, whose pages the system hands out as zeros at the first write;
    torch writes its own zeros at once, and so does calloc where the heap has freed memory. So a launch does not write,
    and the host does not hold, the moments of all weights before the first step does. Fake tensors, small ones and
    those with strides of their own have torch's.
    """
    dtype = dtype or tensor.dtype
    size = tensor.numel() * dtype.itemsize
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous() and size >= SMALL
    if not plain or tensor.device.type != "cpu":
        return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    unwritten = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(unwritten, dtype=dtype).view(tensor.shape)


def zero_averages(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Both moments of AdamW before the first step, on the parameter's device, by default of its type."""
    return {name: zeros_like(parameter, dtype) for name in AVERAGES}
