"""One parameter's step of AdamW, by the kernel of its device: in C on a CPU, in Triton on CUDA, else in plain torch.

All three round each operation by itself and give the same bits. Plain torch takes a parameter in pieces, so that its
temporary memory is bounded: there is never a float32 copy of a whole parameter's moments.
"""

from collections.abc import Iterator
from functools import cache

import torch

from tuner.model.native import library
from tuner.runtime.device import is_traced, target, triton_problem
from tuner.train.moments import BLOCK, FIRST_CELL, LAST_CELL, At, CodeMap, Moment, MomentPart, Step, decode, encode
from tuner.train.stochastic import noise, rounded

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Numbers that plain torch takes at a time: about 80 bytes of temporary memory each."""


def update(part: MomentPart, step: Step) -> None:
    """Take a step, in place."""
    if not part.weight.numel():
        return
    kind = target(part.weight)
    if kind == "cpu" and _has_native():
        _update_native(part, step)
    elif kind == "cuda" and (is_traced() or _has_triton()):
        if not is_traced():
            from tuner.train.triton_adamw import launch

            launch(part, step)
    else:
        update_plainly(part, step)


@cache
def _has_native() -> bool:
    return library.native_problem() is None


@cache
def _has_triton() -> bool:
    return triton_problem() is None


def _update_native(part: MomentPart, step: Step) -> None:
    library.call(
        "adamw", "AdamW", **part.arguments(step), rows=len(part.weight),
        bfloat_gradient=part.gradient.dtype == torch.bfloat16, by_chance=part.key is not None,
        coded=part.average.scales is not None, first_cell=FIRST_CELL, last_cell=LAST_CELL,
    )


def update_plainly(part: MomentPart, step: Step) -> None:
    """The same in plain torch, a piece at a time."""
    rows, width = part.weight.shape
    for where in _pieces(rows, width, CHUNK[part.weight.device.type]):
        _update_piece(part, step, where)


def _pieces(rows: int, width: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows, or where one is larger than this size whole blocks of it."""
    wide = max(BLOCK, size // BLOCK * BLOCK)
    high = max(1, size // width)
    for row in range(0, rows, high):
        for column in range(0, width, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, width))


def _update_piece(part: MomentPart, step: Step, where: tuple[slice, slice]) -> None:
    numbers, (rows, columns) = step.numbers, where
    weight, gradient = part.weight[where], part.gradient[where].float() / numbers[At.DIVISOR]
    average = _read(part.average, step.average_codes, where) * numbers[At.BETA1] + gradient * numbers[At.REST1]
    square = _read(part.square, step.square_codes, where) * numbers[At.BETA2] + gradient * gradient * numbers[At.REST2]
    root = square.double().sqrt().float()  # torch's own of float32 is off by its last bit where MKL computes it
    size = root / numbers[At.ROOT] + numbers[At.EPSILON]
    new = weight.float() * numbers[At.DECAY] - average / size * numbers[At.RATE]
    if part.key is not None:
        whole = range(part.first_row + rows.start, part.first_row + rows.stop)
        across = range(part.first_column + columns.start, part.first_column + columns.stop)
        new = rounded(new, noise(part.key, whole, across, part.whole_width or part.weight.shape[1]))
    keep = None if step.bad is None else step.bad <= 0
    _put(weight, new, keep)
    _write(part.average, average, step.average_codes, where, keep)
    _write(part.square, square, step.square_codes, where, keep)


def _blocks(where: tuple[slice, slice]) -> tuple[slice, slice]:
    return where[0], slice(where[1].start // BLOCK, -(-where[1].stop // BLOCK))


def _read(moment: Moment, codes: CodeMap, where: tuple[slice, slice]) -> torch.Tensor:
    there = moment.numbers[where]
    return there if moment.scales is None else decode(there, moment.scales[_blocks(where)], codes)


def _write(
    moment: Moment, numbers: torch.Tensor, codes: CodeMap, where: tuple[slice, slice], keep: torch.Tensor | None
) -> None:
    if moment.scales is None:
        _put(moment.numbers[where], numbers, keep)
        return
    found, scales = encode(numbers, codes)
    _put(moment.numbers[where], found, keep)
    _put(moment.scales[_blocks(where)], scales, keep)


def _put(there: torch.Tensor, new: torch.Tensor, keep: torch.Tensor | None) -> None:
    there.copy_(new if keep is None else torch.where(keep, new, there))
