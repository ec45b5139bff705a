"""AdamW with moments in 8 bits (Dettmers et al. 2022) or of bf16 weights, whose updates are rounded stochastically.

The state of a matrix is as many plain tensors that lie over the processes as the matrix does, and nothing in an update
depends on which process holds which rows, or which columns: runs are saved, resharded and resumed bit for bit.

A parameter is updated by the kernel of its device: in C on a CPU, in Triton on CUDA, else in plain torch.
All three round each operation by itself and give the same bits. Plain torch takes a parameter in pieces, so that its
temporary memory is bounded: there is never a float32 copy of a whole parameter's moments.

The chance of a rounding depends on the run's seed, the parameter's name, the number of the update, and where a number
lies in the whole parameter, and on nothing else: a run that is resumed, on any number of processes, rounds as one that
is not. No generator has a state that would have to be saved. 16 random bits are added to the 16 that are cut off: a
number is rounded up with a probability of exactly its distance from the one below, and one that bfloat16 has stays as
it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tuner.config.optimizers import AdamwOptimizer
from tuner.errors import RecipeError
from tuner.model.native import library
from tuner.parallel.layouts import Layouts, ShardLayout
from tuner.runtime.device import is_traced, target, triton_problem
from tuner.runtime.parts import Box
from tuner.train import moments
from tuner.train.moments import At, CodeMap, Moment, MomentPart, Step, decode, encode


class CompactAdamW(moments.FlaggedOptimizer):
    """Its parameters are a process's parts as plain tensors; ``coded`` are those whose moments have 8 bits.

    All parameters have one count of updates. ``seed`` is of the rounding. Raises RecipeError for a parameter whose rows
    are split where its blocks, or the random numbers for it, are not.
    """

    def __init__(
        self, groups: list[dict[str, Any]], layouts: Layouts, coded: Set[torch.Tensor],
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
            is_coded = parameter in coded
            self._pieces[parameter] = _pieces(name, layouts[parameter], moments.BLOCK if is_coded else LANES)
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
                    hint="write optimizer.state: fp32" if unit == moments.BLOCK
                    else "write optimizer.rounding: nearest, or take fewer processes for parallel.tensor",
                )
    found = []
    for box in layout.own.boxes:
        rows = slice(box.at[0], box.at[0] + box.sizes[0]) if layout.shape else slice(0, 1)
        columns = _columns(box, layout.shape)
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


def update(part: MomentPart, step: Step) -> None:
    """Take a step, in place."""
    if not part.weight.numel():
        return
    kind = target(part.weight)
    if kind == "cpu" and _has_native():
        _update_native(part, step)
    elif kind == "cuda" and (is_traced() or _triton_problem() is None):
        if not is_traced():
            from tuner.train.triton_adamw import launch

            launch(part, step)
    else:
        update_plainly(part, step)


@cache
def _has_native() -> bool:
    return library.native_problem() is None


_triton_problem = cache(triton_problem)


def _update_native(part: MomentPart, step: Step) -> None:
    library.call(
        "adamw", "AdamW", **part.arguments(step), rows=len(part.weight),
        bfloat_gradient=part.gradient.dtype == torch.bfloat16, by_chance=part.key is not None,
        coded=part.average.scales is not None, first_cell=moments.FIRST_CELL, last_cell=moments.LAST_CELL,
    )


def update_plainly(part: MomentPart, step: Step) -> None:
    """The same in plain torch, a piece at a time."""
    (rows, width), size = part.weight.shape, moments.CHUNK[part.weight.device.type]
    # So many rows, or where one is larger whole blocks of it.
    high, wide = max(1, size // width), max(moments.BLOCK, size // moments.BLOCK * moments.BLOCK)
    for row in range(0, rows, high):
        for column in range(0, width, wide):
            where = slice(row, min(row + high, rows)), slice(column, min(column + wide, width))
            _update_piece(part, step, where)


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
    return where[0], slice(where[1].start // moments.BLOCK, -(-where[1].stop // moments.BLOCK))


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
