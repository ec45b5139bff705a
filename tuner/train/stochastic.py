"""Rounding to bfloat16 stochastically, so that the mean is the number itself.

The chance depends on the run's seed, the parameter's name, the number of the update, and where a number lies in the
whole parameter, and on nothing else: a run that is resumed, on any number of processes, rounds as one that is not. No
generator has a state that would have to be saved. 16 random bits are added to the 16 that are cut off: a number is
rounded up with a probability of exactly its distance from the one below, and one that bfloat16 has stays as it is.
"""

import hashlib
from collections.abc import Sequence

import torch

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
