"""The step of AdamW in Triton: a program works on a few blocks of a parameter; each number is read and written once.

Operations are rounded one by one, none is fused with another: the same bits as `train/compact_adamw.py` in plain torch.
Imported where it is launched alone: Triton is not installed everywhere.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
from triton import language as tl

from tuner.train.moments import BLOCK, FIRST_CELL, LAST_CELL, MomentPart, Step

BLOCKS = 4
"""Of a program."""


@triton.jit
def _mixed(number):
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return number ^ (number >> 31)


@triton.jit
def _rounded(number, counter, lane, key):
    """The upper half of a float32 number's bits, rounded stochastically."""
    bits = number.to(tl.uint32, bitcast=True)
    words = _mixed((counter * 0x9E3779B97F4A7C15) ^ key)
    plain = bits + ((words >> (lane * 16).to(tl.uint64)) & 0xFFFF).to(tl.uint32)
    special = ((bits & 0x7F800000) == 0x7F800000) | ((plain & 0x7F800000) == 0x7F800000)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, bits)  # what is no number stays none
    return (tl.where(special, bits, plain) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _numbers(moment, scales, values, at, mask, block, there, CODED: tl.constexpr):  # noqa: PLR0913, PLR0917
    """A moment's numbers ``[blocks, 256]``."""
    numbers = tl.load(moment + at, mask=mask, other=0)
    if CODED:
        numbers = tl.load(values + numbers.to(tl.int32)) * tl.load(scales + block, mask=there, other=0.0)[:, None]
    return numbers


@triton.jit
def _encode(numbers, mask, cells, FIRST: tl.constexpr, LAST: tl.constexpr, SIGNED: tl.constexpr):
    """Codes of numbers ``[blocks, 256]``, and the scales of the blocks."""
    bits = numbers.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    scale = tl.max(tl.where(mask, bits, 0).to(tl.int32), axis=1).to(tl.float32, bitcast=True)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    share = tl.div_rn(bits.to(tl.float32, bitcast=True), divisor[:, None] + tl.zeros_like(numbers))
    share_bits = share.to(tl.uint32, bitcast=True).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    cell = tl.load(cells + tl.minimum(tl.maximum((share_bits >> 16) - FIRST, 0), LAST - FIRST))
    rank = (cell >> 17) + ((share_bits & 0xFFFF) >= (cell & 0x1FFFF)).to(tl.int32)
    if SIGNED:
        codes = tl.where(numbers < 0.0, 127 - tl.minimum(rank, 127), 127 + rank)
    else:
        codes = tl.where((numbers > 0.0) & (rank < 1), 1, rank)
    return codes.to(tl.uint8), scale


@triton.jit
def _adamw(  # noqa: PLR0913, PLR0917 - pointers and sizes
    gradient, weight, average, square, average_scales, square_scales, average_values, average_cells, square_values,
    square_cells, numbers, bad, key, width, n_blocks, first_row, first_column, whole_width,
    HAS_BAD: tl.constexpr, BY_CHANCE: tl.constexpr, CODED: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    if HAS_BAD:  # noqa: SIM102 - decided when it is compiled
        if tl.load(bad) > 0.0:
            return
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < n_blocks
    per_row = (width + SIZE - 1) // SIZE
    row, column = (block // per_row)[:, None], (block % per_row)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = there[:, None] & (column < width)
    at = row * width + column
    grad = tl.div_rn(tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32), tl.load(numbers))
    m = _numbers(average, average_scales, average_values, at, mask, block, there, CODED)
    v = _numbers(square, square_scales, square_values, at, mask, block, there, CODED)
    m = m * tl.load(numbers + 2) + grad * tl.load(numbers + 3)
    v = v * tl.load(numbers + 4) + grad * grad * tl.load(numbers + 5)
    size = tl.div_rn(tl.sqrt_rn(v), tl.load(numbers + 7) + tl.zeros_like(v)) + tl.load(numbers + 8)
    old = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    new = old * tl.load(numbers + 1) - tl.div_rn(m, size) * tl.load(numbers + 6)
    if BY_CHANCE:
        word = ((first_row + row) * ((whole_width + 3) // 4) + (first_column + column) // 4).to(tl.uint64)
        seed = tl.load(key).to(tl.uint64, bitcast=True)
        tl.store(weight + at, _rounded(new, word, column % 4, seed), mask=mask)
    else:
        tl.store(weight + at, new, mask=mask)
    if CODED:
        codes, scales = _encode(m, mask, average_cells, FIRST, LAST, True)
        tl.store(average + at, codes, mask=mask)
        tl.store(average_scales + block, scales, mask=there)
        codes, scales = _encode(v, mask, square_cells, FIRST, LAST, False)
        tl.store(square + at, codes, mask=mask)
        tl.store(square_scales + block, scales, mask=there)
    else:
        tl.store(average + at, m, mask=mask)
        tl.store(square + at, v, mask=mask)


def launch(part: MomentPart, step: Step) -> None:
    """Take the step of a part, all of whose tensors lie on one device."""
    rows, width = part.weight.shape
    n_blocks = rows * -(-width // BLOCK)
    nothing = {"bad": step.numbers}  # in the place of what is not read; else the weight
    given = part.arguments(step).items()
    _adamw[(triton.cdiv(n_blocks, BLOCKS),)](
        **{name: nothing.get(name, part.weight) if value is None else value for name, value in given},
        n_blocks=n_blocks, HAS_BAD=step.bad is not None, BY_CHANCE=part.key is not None,
        CODED=part.average.scales is not None, SIZE=BLOCK, BLOCKS=BLOCKS, FIRST=FIRST_CELL, LAST=LAST_CELL,
        enable_fp_fusion=False,
    )
