"""For which kind of device kernels are chosen: the one that a tensor lies on, or one that a trace stands in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_traced: str | None = None
"""Process-wide, and no context variable: compiled layers read it."""


def target(tensor: torch.Tensor) -> str:
    """``cpu`` or ``cuda``: whose kernels an operation on this tensor takes."""
    return _traced or tensor.device.type


@contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """Within, every tensor counts as one on this kind of device, which need not be here: for fake tensors alone."""
    global _traced  # noqa: PLW0603
    before, _traced = _traced, kind
    try:
        yield
    finally:
        _traced = before
