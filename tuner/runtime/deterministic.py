"""Deterministic kernels for the length of a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse kernels whose result depends on the order of threads, where that is ``wanted``.

    cuBLAS needs a fixed workspace for it, which it reads when it is first used: enter before any CUDA work.
    """
    if not wanted:
        yield
        return
    import torch
    from torch.utils import deterministic as module

    settings: Any = module
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, settings.fill_uninitialized_memory
    workspace = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Else every tensor that is made to be written to (gathered weights, activations) is first filled with NaN.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        settings.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
