"""Rows of one size: every microbatch filled up to the same number of tokens, so that a compiled layer never changes."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Padding:
    """Fills microbatches up to ``tokens`` with documents of at most ``longest``, from which nothing is learned."""

    tokens: int
    longest: int

    def fill(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Ids and positions ``[tokens]`` and the lengths of all documents; a full microbatch comes back as is."""
        missing = self.tokens - input_ids.shape[0]
        if missing <= 0:
            return input_ids, position_ids, lengths
        whole, rest = divmod(missing, self.longest)
        added = torch.arange(missing, device=position_ids.device) % self.longest
        return (
            functional.pad(input_ids, (0, missing)),
            torch.cat((position_ids, added)),
            (*lengths, *[self.longest] * whole, *[rest][: rest > 0]),
        )
