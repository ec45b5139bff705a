"""How kernels compute for the length of a block: deterministically, and float32 products as TF32."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as module

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse kernels whose result depends on the order of threads, where that is ``wanted``.

    cuBLAS needs a fixed workspace for it, which it reads when it is first used: enter before any CUDA work.
    """
    if not wanted:
        yield
        return
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


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Multiply float32 matrices on CUDA as TF32 where that is ``wanted``: of 23 bits 10 are multiplied, all are added.

    Set by the older of torch's two switches (https://docs.pytorch.org/docs/stable/notes/cuda.html): after the newer
    one, ``fp32_precision``, the compiler's questions for the older one raise RuntimeError.
    """
    if not wanted:
        yield
        return
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32 = before
