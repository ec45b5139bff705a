"""Codes and scales of a weight, and the weight that they stand for: pure functions, with the same bits everywhere.

`nf4` is NormalFloat of 4 bits (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), as bitsandbytes computes it: a
code stands for one of 16 values, those of a normal distribution's quantiles, of which the outermost are 1 and -1. Two
codes lie in a byte, the earlier column in its upper half. `int8` are symmetric integers by the arithmetic of LLM.int8
(Dettmers et al. 2022, https://arxiv.org/abs/2208.07339): a number's 127th parts of its block's largest magnitude,
rounded, ties to even.

A block is 64 consecutive numbers of a row, the last of a row what is left: rows know nothing of one another, so that a
cut between rows is a cut between blocks. All arithmetic is float32 by single operations that IEEE 754 rounds exactly;
nothing is summed up. Scales are plain float32: 0.5625 bytes for a weight of 4 bits, and 1.0625 for one of 8. The
kernels compiled for this processor give the bits of plain torch, sooner.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.nn import functional

from tuner.errors import DataError, RecipeError
from tuner.model.native import library

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

    @staticmethod
    def empty(weight: torch.Tensor, kind: Kind) -> "Quantized":
        """Memory for those of a weight ``[out, columns]``, on its device."""
        rows, columns = weight.shape
        codes = weight.new_empty(rows, code_columns(kind, columns), dtype=code_type(kind))
        return Quantized(codes, weight.new_empty(rows, scale_columns(columns), dtype=torch.float32), columns)


def kind_of(codes: torch.Tensor) -> Kind:
    """What codes are: ``nf4`` in uint8, ``int8`` in int8."""
    return "nf4" if codes.dtype == torch.uint8 else "int8"


def code_type(kind: Kind) -> torch.dtype:
    """The type of the codes."""
    return torch.uint8 if kind == "nf4" else torch.int8


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
    found, fill = Quantized.empty(weight, kind), _fill_in_c if native and weight.device.type == "cpu" else _fill
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        if (bad := fill(weight[part], found.codes[part], found.scales[part])) is not None:
            raise DataError(
                f"{name}: row {first + bad} holds NaN, infinity or a number above 1.3e36: it cannot be quantised",
                hint="the model's files are damaged, or it diverged in training: choose another checkpoint of it",
            )
    return found


@torch.no_grad()
def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight ``[out, columns]`` that codes and scales stand for: computed in float32, rounded to ``dtype``."""
    wide = decode_nf4(codes) if kind_of(codes) == "nf4" else codes
    each = scales.repeat_interleave(BLOCK, 1)[:, :columns]
    products = wide[:, :columns] * each
    return (products if kind_of(codes) == "nf4" else products * INT8_STEP).to(dtype)


def _fill(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> int | None:
    """Fill codes and scales of some rows; returns the first that holds what has no code, where one does."""
    blocks = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    wrong = ~(largest <= HUGE)  # so is NaN
    if bool(wrong.any()):
        return int(wrong.any(1).nonzero()[0])
    scales.copy_(torch.where(largest < TINY, 0.0, largest))
    encode = encode_nf4 if kind_of(codes) == "nf4" else encode_int8
    codes.copy_(encode(blocks, scales).flatten(1)[:, : codes.shape[1]])
    return None


TYPES_IN_C = (torch.bfloat16, torch.float32)
"""What the kernels read and write as weights."""


def _fill_in_c(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> int | None:
    """The same, in dense codes and scales. Raises MachineError where there is no kernel."""
    weight = (weight if weight.dtype in TYPES_IN_C else weight.float()).contiguous()
    bad = library.call(
        "quantize", "Quantize", weight=weight, bounds=nf4_bounds(weight.device) if codes.dtype == torch.uint8 else None,
        codes=codes, scales=scales, rows=len(weight), columns=weight.shape[1], code_stride=codes.shape[1],
        blocks=scales.shape[1], is_bfloat=weight.dtype == torch.bfloat16, tiny=TINY, huge=HUGE,
    )
    return bad - 1 if bad else None


def decode_in_c(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill a dense ``[rows, columns]`` of :data:`TYPES_IN_C`. Rows of codes and scales may lie apart, each dense.

    Raises MachineError where there is no kernel.
    """
    library.call(
        "dequantize", "Dequantize", codes=codes, scales=scales, output=output, rows=len(codes),
        values=nf4_values(codes.device) if codes.dtype == torch.uint8 else None, columns=output.shape[1],
        code_stride=codes.stride(0), scale_stride=scales.stride(0), is_bfloat=output.dtype == torch.bfloat16,
        step=INT8_STEP,
    )


NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes 0 to 15 stand for; each is a float32 number."""


def encode_nf4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of finite float32 ``[..., B]``, B even, two in a byte, by scales ``[...]``: their largest magnitudes.

    A number's code is that of the nearest value to it, times the reciprocal of the scale, in float32; of two equally
    near the lower. Blocks whose scale is 0 are zeros.
    """
    factors = torch.where(scales > 0, scales.reciprocal(), 0.0)
    codes = torch.bucketize(blocks * factors[..., None], nf4_bounds(blocks.device), out_int32=True).to(torch.uint8)
    return codes[..., ::2] << 4 | codes[..., 1::2]


def decode_nf4(codes: torch.Tensor) -> torch.Tensor:
    """Values float32 ``[..., 2 B]`` of bytes ``[..., B]``."""
    halves = torch.stack((codes >> 4, codes & 15), -1)
    return nf4_values(codes.device)[halves.flatten(-2).to(torch.int32)]


def nf4_values(device: torch.device) -> torch.Tensor:
    """:data:`NF4_VALUES` as float32 ``[16]``."""
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


def nf4_bounds(device: torch.device) -> torch.Tensor:
    """Float32 ``[15]``: up to each of them, itself included, a number belongs to the lower of two codes."""
    # Computed on the CPU: every device has the same bits.
    table = torch.tensor(NF4_VALUES, dtype=torch.float32)
    return ((table[:-1] + table[1:]) / 2).to(device)


INT8_STEP = 7.874015718698502e-3
"""One over 127, as bitsandbytes writes it: a float32 number."""


def encode_int8(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes int8 of finite float32 ``[..., B]`` by scales ``[...]``: largest magnitudes; 0 for blocks of zeros."""
    # Rounded twice, as torch divides a number by a tensor, and so as bitsandbytes does.
    factors = torch.where(scales > 0, scales.reciprocal() * 127.0, 0.0)
    return torch.round(blocks * factors[..., None]).to(torch.int8)
