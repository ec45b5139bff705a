"""NormalFloat of 4 bits (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), as bitsandbytes computes it.

A code stands for one of 16 values: those of a normal distribution's quantiles, of which the outermost are 1 and -1. Two
codes lie in a byte, the earlier column in its upper half.
"""

import torch

VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What the codes 0 to 15 stand for; each is a float32 number."""


def encode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 of finite float32 ``[..., B]``, B even, two in a byte, by scales ``[...]``: their largest magnitudes.

    A number's code is that of the nearest value to it, times the reciprocal of the scale, in float32; of two equally
    near the lower. Blocks whose scale is 0 are zeros.
    """
    factors = torch.where(scales > 0, scales.reciprocal(), 0.0)
    codes = torch.bucketize(blocks * factors[..., None], bounds(blocks.device), out_int32=True).to(torch.uint8)
    return codes[..., ::2] << 4 | codes[..., 1::2]


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values float32 ``[..., 2 B]`` of bytes ``[..., B]``."""
    halves = torch.stack((codes >> 4, codes & 15), -1)
    return values(codes.device)[halves.flatten(-2).to(torch.int32)]


def values(device: torch.device) -> torch.Tensor:
    """:data:`VALUES` as float32 ``[16]``."""
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


def bounds(device: torch.device) -> torch.Tensor:
    """Float32 ``[15]``: up to each of them, itself included, a number belongs to the lower of two codes."""
    # Computed on the CPU: every device has the same bits.
    table = torch.tensor(VALUES, dtype=torch.float32)
    return ((table[:-1] + table[1:]) / 2).to(device)
