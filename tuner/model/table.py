"""An embedding as a table whose rows are looked up: which ones are, and rows that are found otherwise than by torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

WORD = torch.int32
"""What rows are added as: sums of whole numbers with zeros are exact, and backends know this type."""


def is_plain(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether an embedding looks rows up and at most scales them."""
    if not isinstance(embedding, nn.Embedding):
        return False
    if type(embedding).forward is not nn.Embedding.forward and not hasattr(embedding, "embed_scale"):
        return False
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


def can_be_looked_up(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """The same, where rows and gradients can be summed besides."""
    if not is_plain(embedding):
        return False
    weight = embedding.weight
    summed = weight.dtype == torch.float32 or not weight.requires_grad
    return summed and weight.shape[1] * weight.element_size() % WORD.itemsize == 0


class LookedUp(ABC):
    """The forward of an embedding that is its class's own, but for the rows of its weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self.embedding = embedding

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the embedding gives for token ids int64 of any shape."""
        with _RowsFrom(self.embedding, self.rows):
            output: torch.Tensor = type(self.embedding).forward(self.embedding, input_ids)
        return output

    @abstractmethod
    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[..., D]`` of the weight for these ids."""


class _RowsFrom(TorchFunctionMode):
    """Within, the rows of one embedding's weight are those that ``find`` gives for token ids of any shape."""

    def __init__(self, embedding: nn.Embedding, find: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._embedding, self._find = embedding, find

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or ``find`` where it looks rows of this embedding up."""
        if func is functional.embedding and args[1] is self._embedding.weight:
            return self._find(args[0])
        return func(*args, **(kwargs or {}))
