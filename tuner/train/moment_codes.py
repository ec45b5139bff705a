"""Numbers in 8 bits, block by block: the dynamic map of Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861).

A block is up to 256 neighbours of one row, where a row is what one index of the first dimension means. So a process
that holds rows holds whole blocks: codes and scales are cut, sent and put together by rows at any number of processes,
and nothing is ever quantised again. A block's scale is its largest magnitude; a code is the nearest of 256 values from
-1 to 1, or from 0 to 1: over seven decades, with the fewer digits the smaller they are.

Where a number is not negative (a second moment), only zero itself becomes zero: what it divides would be thrown far off
by a zero in place of a small number (Li et al. 2023, https://arxiv.org/abs/2309.01507).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional

BLOCK = 256
LEAST_NUMBERS, LEAST_WIDTH = 4096, 16
"""Numbers of a matrix, and of a row, from which on its moments are coded: below, scales take what codes save."""
_DECADES = 7
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
    values, bounds, cells = _tables(signed)
    return CodeMap(
        placed(values, torch.float32, device),
        placed(bounds, torch.float32, device),
        placed(cells, torch.int32, device),
        signed,
    )


def placed(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers in memory of the device, allocated as a prediction sees it."""
    return torch.empty(len(numbers), dtype=dtype, device=device).copy_(torch.tensor(numbers, dtype=dtype))


@cache
def _tables(signed: bool) -> tuple[list[float], list[float], list[int]]:
    """Values, bounds and cells as numbers: tensors are not kept here, since a prediction's are no real ones."""
    magnitudes = _magnitudes(signed)
    values = [-one for one in magnitudes[127:0:-1]] + magnitudes if signed else magnitudes
    bounds = [_float32((a + b) / 2) for a, b in zip(magnitudes, magnitudes[1:], strict=False)]
    starts = [0.0, *(_of_bits(cell << CELL_BITS) for cell in range(FIRST_CELL + 1, LAST_CELL + 1))]
    ranks = [bisect_right(bounds, start) for start in starts]
    within = {_bits_of(bound) >> CELL_BITS: _bits_of(bound) % NO_BOUND for bound in bounds}
    cells = [rank * 2 * NO_BOUND + (within.get(FIRST_CELL + n, 0) or NO_BOUND) for n, rank in enumerate(ranks)]
    return values, bounds, cells


def _magnitudes(signed: bool) -> list[float]:
    """Zero, the middles of equal parts of seven decades, twice as many in each as in the one below, and 1."""
    found = [0.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        for part in range(parts):
            middle = 0.1 + 0.9 * (part + 0.5) / parts
            found.append(_float32(middle / 10 ** (_DECADES - 1 - decade)))
    return [*found, 1.0]


def _float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _bits_of(number: float) -> int:
    return int(struct.unpack("I", struct.pack("f", number))[0])


def _of_bits(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits))[0])


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows of a tensor of this shape, and numbers of each."""
    rows = shape[0] if len(shape) else 1
    return rows, math.prod(shape[1:])


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
