"""What a model asks of whoever cuts its rows over processes (:mod:`tuner.parallel.sequence`): types alone."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tuner.model.documents import Documents
from tuner.model.output_layer import OutputLayer

Positions = torch.Tensor | npt.NDArray[np.int64]
"""int64 ``[N]``: on the device, or on the host, where nobody waits for the device to learn who has them."""


class RowCut(Protocol):
    """A row of T tokens in equal shares of t positions."""

    def fill(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Ids and positions of a row that can be cut, and the lengths of its documents."""
        ...

    def exchanging(self, documents: Documents, position_ids: torch.Tensor) -> Documents:
        """The documents of a whole row ``[T]``, for layers that see a share of it."""
        ...

    def own(self, of_row: torch.Tensor) -> torch.Tensor:
        """This process's share ``[t, ...]`` of what is there for each position ``[T, ...]``."""
        ...

    def taken(self, hidden: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Of hidden states ``[t, D]`` on each process those at N positions, in order, in even shares ``[n, D]``."""
        ...

    def whole(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """All of what was taken, ``[N, D]``, from this process's share ``[n, D]``."""
        ...

    def head(self, layer: OutputLayer, count: int) -> OutputLayer:
        """An output layer for shares of N positions."""
        ...
