"""What a low-rank adapter adds to one weight, as numbers: for merging it."""

from dataclasses import dataclass

import torch


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

    @property
    def needs_all(self) -> bool:
        """Whether no row of the weight can be merged without all others."""
        return self.transposed and self.length is not None

    def added_to(self, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
        """W + s·B·A in float32 of the weight's ``rows`` from ``start`` on; with DoRA each output has its length.

        An output's length needs all of it: of transposed weights, all rows.
        """
        part = slice(start, start + len(rows))
        a, b = (self.a[:, part], self.b) if self.transposed else (self.a, self.b[part])
        merged = rows.float() + ((b @ a).T if self.transposed else b @ a) * self.scale
        if self.length is None:
            return merged
        lengths: torch.Tensor = torch.linalg.vector_norm(merged, dim=0 if self.transposed else 1)
        if self.transposed:
            return merged * (self.length / lengths)[None, :]
        return merged * (self.length[part] / lengths)[:, None]


@dataclass(frozen=True)
class ExpertsLowRank:
    """What the adapters of a layer's routed experts add to one weight of all: ``scale``·B·A of each.

    A ``[E, r, in]`` and B ``[E, out, r]`` in float32; ``transposed`` weights are ``[E, in, out]``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool = False
    needs_all = False

    def added_to(self, experts: torch.Tensor, start: int = 0) -> torch.Tensor:
        """W + s·B·A in float32 of the weights of ``experts`` from ``start`` on."""
        part = slice(start, start + len(experts))
        product = self.b[part] @ self.a[part]
        return experts.float() + (product.mT if self.transposed else product) * self.scale
