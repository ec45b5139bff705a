"""What a device can do at most, measured as this process runs it."""

from __future__ import annotations

import time
from functools import cache
from typing import Literal

ROUNDS = 4


@cache
def measured_peak(kind: Literal["cuda", "cpu"], precision: str, index: int = 0) -> float:
    """Operations per second in one large product of random bf16 or fp32 matrices: the best of a few, once a process.

    Draws from a generator of its own, so that no other random number changes; on CUDA it returns its memory.
    """
    import torch

    device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
    side, dtype = side_of(kind, torch.get_num_threads()), torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    result = torch.empty(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        torch.mm(left, right, out=result)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    if kind == "cuda":
        del left, right, result
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * side**3 / best


def side_of(kind: Literal["cuda", "cpu"], threads: int) -> int:
    """Rows and columns of the matrices: so large that nothing but the product counts, and no larger."""
    if kind == "cuda":
        return 8192
    return 1024 if threads <= 4 else 2048 if threads <= 32 else 4096
