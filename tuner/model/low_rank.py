"""What a low-rank adapter adds to one weight, as numbers: for merging it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one weight: ``scale``·B·A, A ``[r, in]`` and B ``[out, r]`` in float32.

    ``length`` ``[out]`` are DoRA's lengths of the outputs (Liu et al. 2024); ``transposed`` weights are ``[in, out]``.
    Of the routed experts of a layer, whose weights are one tensor, A and B are ``[E, r, in]`` and ``[E, out, r]``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    length: torch.Tensor | None = None
    transposed: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether no row of the weight can be merged without all others."""
        return self.transposed and self.length is not None

    def added_to(self, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
        """W + s·B·A in float32 of the weight's ``rows``, or experts, from ``start`` on; with DoRA each output has its
        length.

        An output's length needs all of it: of transposed weights, all rows.
        """
        part = slice(start, start + len(rows))
        if self.a.ndim > 2:  # [E, r, in]
            a, b = self.a[part], self.b[part]
        else:
            a, b = (self.a[:, part], self.b) if self.transposed else (self.a, self.b[part])
        merged = rows.float() + ((b @ a).mT if self.transposed else b @ a) * self.scale
        if self.length is None:
            return merged
        lengths: torch.Tensor = torch.linalg.vector_norm(merged, dim=0 if self.transposed else 1)
        if self.transposed:
            return merged * (self.length / lengths)[None, :]
        return merged * (self.length[part] / lengths)[:, None]
