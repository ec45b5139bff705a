"""One parameter's step of AdamW, by the kernel of its device: in C on a CPU, in Triton on CUDA, else in plain torch;
and rounding to bfloat16 stochastically, so that the mean is the number itself.

All three round each operation by itself and give the same bits. Plain torch takes a parameter in pieces, so that its
temporary memory is bounded: there is never a float32 copy of a whole parameter's moments.

The chance of a rounding depends on the run's seed, the parameter's name, the number of the update, and where a number
lies in the whole parameter, and on nothing else: a run that is resumed, on any number of processes, rounds as one that
is not. No generator has a state that would have to be saved. 16 random bits are added to the 16 that are cut off: a
number is rounded up with a probability of exactly its distance from the one below, and one that bfloat16 has stays as
it is.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from tuner.model.native import library
from tuner.runtime.device import is_traced, target, triton_problem
from tuner.train.moments import BLOCK, FIRST_CELL, LAST_CELL, At, CodeMap, Moment, MomentPart, Step, decode, encode

GOLDEN = 0x9E3779B97F4A7C15
LANES = 4
"""Random numbers of 16 bits in one of 64: those of neighbouring columns."""
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_HALF, _KEPT, _INFINITE, _QUIET = 0xFFFF, -0x10000, 0x7F800000, 0x400000


def _signed(number: int) -> int:
    """A 64-bit pattern as torch's int64 holds it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Each int64 number's hash: the finaliser of splitmix64 (Steele et al. 2014), a bijection."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        numbers = numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))
        numbers = numbers if factor is None else numbers * _signed(factor)
    return numbers


def name_keys(seed: int, names: Sequence[str]) -> list[int]:
    """A 64-bit number for each parameter of a run, as int64 holds it."""
    hashes = (hashlib.sha256(f"{seed}\0{name}".encode()).digest() for name in names)
    return [int.from_bytes(digest[:8], "little", signed=True) for digest in hashes]


def step_keys(keys: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The keys, int64 ``[n]``, of parameters in the update of this number, a scalar on their device."""
    return mixed(keys ^ mixed(step.long() * _signed(GOLDEN)))


def noise(key: torch.Tensor, rows: range, columns: range, width: int) -> torch.Tensor:
    """Numbers of 16 random bits, int32 ``[rows, columns]``, for a part of a parameter whose rows have this width.

    ``rows`` are counted in the whole parameter; ``columns`` begin at a multiple of 4.
    """
    words, first = -(-width // LANES), columns.start // LANES
    needed = -(-len(columns) // LANES)
    row = torch.arange(rows.start, rows.stop, device=key.device).unsqueeze(1)
    counter = row * words + torch.arange(first, first + needed, device=key.device)
    random = mixed((counter * _signed(GOLDEN)) ^ key)
    return random.view(torch.int16)[:, : len(columns)].int() & _HALF


def rounded(numbers: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Float32 numbers as bfloat16, up or down by these random bits, int32 of the same shape.

    A finite number stays finite: above the largest that bfloat16 has there is none to round up to.
    """
    bits = numbers.view(torch.int32)
    plain = bits + random
    special = ((bits & _INFINITE) == _INFINITE) | ((plain & _INFINITE) == _INFINITE)
    found = torch.where(special, torch.where(numbers.isnan(), bits | _QUIET, bits), plain) & _KEPT
    return (found >> 16).to(torch.int16).view(torch.bfloat16)


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
