"""Adapted weights as the one weight that computes the same, merged a block of rows at a time in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tuner.export.rows import Rows, n_rows


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


class MergedRows:
    """W + s·B·A in float32, rounded by nobody here; with DoRA each output is then brought to its length."""

    dtype = torch.float32

    def __init__(self, base: Rows, load: Callable[[], LowRank]) -> None:
        self.shape = base.shape
        self._base, self._load = base, load
        self._adapter: LowRank | None = None
        self._whole: torch.Tensor | None = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        adapter = self._adapter = self._adapter or self._load()
        last = stop == n_rows(self.shape)
        if not (adapter.transposed and adapter.length is not None):
            part = self._merged(adapter, start, stop)
        else:
            if self._whole is None:  # an output's length needs all rows
                self._whole = self._merged(adapter, 0, n_rows(self.shape))
            part = self._whole[start:stop]
        if last:
            self._adapter = self._whole = None
        return part

    def _merged(self, adapter: LowRank, start: int, stop: int) -> torch.Tensor:
        a, b = (adapter.a[:, start:stop], adapter.b) if adapter.transposed else (adapter.a, adapter.b[start:stop])
        delta = (b @ a).T if adapter.transposed else b @ a
        merged = self._base.read(start, stop).float() + delta * adapter.scale
        if adapter.length is None:
            return merged
        lengths: torch.Tensor = torch.linalg.vector_norm(merged, dim=0 if adapter.transposed else 1)
        if adapter.transposed:
            return merged * (adapter.length / lengths)[None, :]
        return merged * (adapter.length[start:stop] / lengths)[:, None]
