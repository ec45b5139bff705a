"""Adapted weights as the one weight that computes the same, merged a block at a time in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tuner.export.tensors import TensorSource


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one weight: ``scale``·B·A, A ``[r, in]`` and B ``[out, r]`` in float32.

    ``length`` ``[out]`` are DoRA's lengths of the outputs (Liu et al. 2024); ``transposed`` weights are ``[in, out]``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    length: torch.Tensor | None = None
    transposed: bool = False


def merged_tensor(base: TensorSource, load: Callable[[], LowRank]) -> TensorSource:
    """W + s·B·A in float32, not rounded; with DoRA each output is then brought to its length.

    The adapter is loaded for the first block and dropped after the last.
    """
    adapter = functools.cache(load)
    # An output's length needs all of it, which of transposed weights lies in every slice.
    whole = functools.cache(lambda: _merged(base, adapter(), 0, base.length))

    def read(start: int, stop: int) -> torch.Tensor:
        if adapter().transposed and adapter().length is not None:
            part = whole()[start:stop]
        else:
            part = _merged(base, adapter(), start, stop)
        if stop == base.length:
            adapter.cache_clear()
            whole.cache_clear()
        return part

    return TensorSource(base.shape, torch.float32, read)


def _merged(base: TensorSource, adapter: LowRank, start: int, stop: int) -> torch.Tensor:
    a, b = (adapter.a[:, start:stop], adapter.b) if adapter.transposed else (adapter.a, adapter.b[start:stop])
    delta = (b @ a).T if adapter.transposed else b @ a
    merged = base.read(start, stop).float() + delta * adapter.scale
    if adapter.length is None:
        return merged
    lengths: torch.Tensor = torch.linalg.vector_norm(merged, dim=0 if adapter.transposed else 1)
    if adapter.transposed:
        return merged * (adapter.length / lengths)[None, :]
    return merged * (adapter.length[start:stop] / lengths)[:, None]
