"""The weight that codes stand for, made in Triton: the bits of :func:`tuner.model.quantize.codes.dequantize`.

Imported where it is launched alone: Triton is not installed everywhere.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from functools import cache

import torch
import triton
from triton import language as tl

from tuner.model.quantize import codes
from tuner.model.quantize.codes import BLOCK, kind_of

_ROWS = {"nf4": 16, "int8": 8}
_STEP: tl.constexpr = tl.constexpr(codes.INT8_STEP)


@triton.jit
def _rounded(numbers, DTYPE: tl.constexpr):
    """Float32 numbers in another type, ties to even; by integers to bfloat16, so that the interpreter shows it too."""
    if tl.bfloat16 == DTYPE:
        raw = numbers.to(tl.uint32, bitcast=True)
        return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return numbers.to(DTYPE)


@triton.jit
def _pairs(  # noqa: PLR0913, PLR0917 - a kernel's arguments are pointers and numbers
    codes, scales, values, output, rows, columns, code_stride, scale_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of 64 columns of some rows: two codes in a byte, the earlier in its upper half."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    half = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    inside = (row < rows)[:, None]
    there = inside & (half * 2 < columns)[None, :]
    both = tl.load(codes + row[:, None] * code_stride + half[None, :], mask=there, other=0).to(tl.int32)
    scale = tl.load(scales + row * scale_stride + block, mask=row < rows, other=0.0)[:, None]
    earlier = tl.load(values + (both >> 4)) * scale
    later = tl.load(values + (both & 15)) * scale
    numbers = tl.join(earlier, later).reshape(ROWS, BLOCK)
    column = block * BLOCK + tl.arange(0, BLOCK)
    where = output + row[:, None] * columns + column[None, :]
    tl.store(where, _rounded(numbers, output.dtype.element_ty), mask=inside & (column < columns)[None, :])


@triton.jit
def _bytes(  # noqa: PLR0913, PLR0917
    codes, scales, values, output, rows, columns, code_stride, scale_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of 64 columns of some rows, of one code in a byte: times its scale, then times the step."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    code = tl.load(codes + row[:, None] * code_stride + column[None, :], mask=there, other=0).to(tl.float32)
    scale = tl.load(scales + row * scale_stride + block, mask=row < rows, other=0.0)[:, None]
    where = output + row[:, None] * columns + column[None, :]
    tl.store(where, _rounded(code * scale * _STEP, output.dtype.element_ty), mask=there)


def fill(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Make the weight in a dense ``[out, columns]``. Rows of codes and scales may lie apart, each of them dense."""
    (rows, columns), kind = output.shape, kind_of(codes)
    kernel = _pairs if kind == "nf4" else _bytes
    kernel[(triton.cdiv(rows, _ROWS[kind]), triton.cdiv(columns, BLOCK))](
        codes, scales, _values(codes.device), output, rows, columns, codes.stride(0), scales.stride(0),
        ROWS=_ROWS[kind], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@cache
def _values(device: torch.device) -> torch.Tensor:
    """Copied to a device once: a copy waits."""
    return codes.nf4_values(device)
