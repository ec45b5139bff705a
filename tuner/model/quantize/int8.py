"""Symmetric integers of 8 bits, by the arithmetic of LLM.int8 (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339).

A code is a number's 127th parts of its block's largest magnitude, rounded, ties to even.
"""

import torch

STEP = 7.874015718698502e-3
"""One over 127, as bitsandbytes writes it: a float32 number."""


def encode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes int8 of finite float32 ``[..., B]`` by scales ``[...]``: largest magnitudes; 0 for blocks of zeros."""
    # Rounded twice, as torch divides a number by a tensor, and so as bitsandbytes does.
    factors = torch.where(scales > 0, scales.reciprocal() * 127.0, 0.0)
    return torch.round(blocks * factors[..., None]).to(torch.int8)
