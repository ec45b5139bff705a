"""Deterministic kernels for the length of a block, and everything as it was after it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse kernels whose result depends on the order of threads, where that is ``wanted``.

    cuBLAS needs a fixed workspace for it, which it reads when it is first used: enter before any CUDA work.
    """
    if not wanted:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(_CUBLAS),
    )
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        if before[3] is None:
            os.environ.pop(_CUBLAS, None)
