"""Codes and scales of a weight, and the weight that they stand for: pure functions, with the same bits everywhere.

A block is 64 consecutive numbers of a row, the last of a row what is left: rows know nothing of one another, so that a
cut between rows is a cut between blocks. All arithmetic is float32 by single operations that IEEE 754 rounds exactly;
nothing is summed up. Scales are plain float32: 0.5625 bytes for a weight of 4 bits, and 1.0625 for one of 8.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.nn import functional

from tuner.errors import DataError, RecipeError
from tuner.model.quantize import int8, nf4

Kind = Literal["nf4", "int8"]
BLOCK = 64
"""So many columns have one scale."""
TINY = 2.0**-100
"""A block of smaller numbers is one of zeros: what is computed never depends on how a processor takes denormals."""
HUGE = 2.0**120
"""No number may be larger: LLM.int8 multiplies scales by 127 before it divides by that."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What is quantised, and what it is turned back to."""
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Quantized:
    """A quantised weight of ``columns`` input features: plain tensors, of which dim 0 may be cut anywhere.

    ``codes`` are uint8 ``[out, ceil(columns / 2)]`` (``nf4``) or int8 ``[out, columns]`` (``int8``); ``scales`` float32
    ``[out, ceil(columns / 64)]`` are the largest magnitudes of the blocks.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    columns: int

    @property
    def kind(self) -> Kind:
        """What the codes are: their type says it."""
        return kind_of(self.codes)


def kind_of(codes: torch.Tensor) -> Kind:
    """What codes are: ``nf4`` in uint8, ``int8`` in int8."""
    return "nf4" if codes.dtype == torch.uint8 else "int8"


def code_type(kind: Kind) -> torch.dtype:
    """The type of the codes."""
    return torch.uint8 if kind == "nf4" else torch.int8


def recipe_of(kind: Kind) -> dict[str, str | int]:
    """All that codes and scales of a weight depend on but the weight; a checkpoint keeps it next to the base's hash."""
    return {"kind": kind, "block": BLOCK, "scales": "float32", "version": 1}


def code_columns(kind: Kind, columns: int) -> int:
    """Columns of the codes of a weight with so many columns."""
    return -(-columns // 2) if kind == "nf4" else columns


def scale_columns(columns: int) -> int:
    """Columns of the scales of a weight with so many columns."""
    return -(-columns // BLOCK)


@torch.no_grad()
def quantize(weight: torch.Tensor, kind: Kind, name: str = "weight", native: bool = False) -> Quantized:
    """Codes and scales of a weight ``[out, columns]`` of :data:`TYPES`, on its device.

    With ``native`` the CPU computes the same bits by the compiled kernel. Raises DataError, with the ``name`` and the
    row, for NaN, infinity and what is above :data:`HUGE`; RecipeError for another shape or type; MachineError where
    there is no kernel.
    """
    if weight.ndim != 2 or 0 in weight.shape or weight.dtype not in TYPES or kind not in get_args(Kind):
        raise RecipeError(f"{name}: a {weight.dtype} of shape {[*weight.shape]} cannot be quantised to {kind}")
    rows, columns = weight.shape
    codes = torch.empty(rows, code_columns(kind, columns), dtype=code_type(kind), device=weight.device)
    scales = torch.empty(rows, scale_columns(columns), dtype=torch.float32, device=weight.device)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        bad = (_fill_in_c if native and weight.device.type == "cpu" else _fill)(weight[part], codes[part], scales[part])
        if bad is not None:
            raise DataError(
                f"{name}: row {first + bad} holds NaN, infinity or a number above 1.3e36: it cannot be quantised",
                hint="the model's files are damaged, or it diverged in training: choose another checkpoint of it",
            )
    return Quantized(codes, scales, columns)


@torch.no_grad()
def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight ``[out, columns]`` that codes and scales stand for: computed in float32, rounded to ``dtype``."""
    wide = nf4.decode(codes) if kind_of(codes) == "nf4" else codes
    each = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    products = wide[:, :columns] * each
    return (products if kind_of(codes) == "nf4" else products * int8.STEP).to(dtype)


def _fill(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> int | None:
    """Fill codes and scales of some rows; returns the first that holds what has no code, where one does."""
    blocks = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    wrong = ~(largest <= HUGE)  # so is NaN
    if bool(wrong.any()):
        return int(wrong.any(1).nonzero()[0])
    scales.copy_(torch.where(largest < TINY, 0.0, largest))
    encode = nf4.encode if kind_of(codes) == "nf4" else int8.encode
    codes.copy_(encode(blocks, scales).flatten(1)[:, : codes.shape[1]])
    return None


def _fill_in_c(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> int | None:
    from tuner.model.quantize import in_c

    return in_c.encode(weight if weight.dtype in in_c.TYPES else weight.float(), codes, scales, TINY, HUGE)
