"""An embedding as a table whose rows are looked up: which ones are, and rows that are found otherwise than by torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WORD = torch.int32
"""What rows are added as: sums of whole numbers with zeros are exact, and backends know this type."""


def can_be_looked_up(embedding: nn.Embedding) -> bool:
    """Whether an embedding's forward looks rows up and at most scales them, and rows and gradients can be summed."""
    weight = embedding.weight
    if type(embedding).forward is not nn.Embedding.forward and not hasattr(embedding, "embed_scale"):
        return False
    if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        return False
    summed = weight.dtype == torch.float32 or not weight.requires_grad
    return summed and weight.shape[1] * weight.element_size() % WORD.itemsize == 0


class RowsFrom(TorchFunctionMode):
    """Within, the rows of one embedding's weight are those that ``find`` gives for token ids of any shape."""

    def __init__(self, embedding: nn.Embedding, find: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._embedding, self._find = embedding, find

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or ``find`` where it looks rows of this embedding up."""
        if func is functional.embedding and args[1] is self._embedding.weight:
            return self._find(args[0])
        return func(*args, **(kwargs or {}))
