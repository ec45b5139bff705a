"""An embedding of whose rows each process has some: the rows that it lacks are zeros, and a sum brings them together.

A row is on one process of a group alone: added to zeros it stays what it is. Its gradient is whole on each of them,
and each takes that of its own rows.
"""

import torch
from torch import nn
from torch.nn import functional

from tuner.model.table import RowsFrom
from tuner.parallel.tensor.collectives import Group, summed
from tuner.parallel.tensor.layers import own_weight


def is_plain(embedding: nn.Module) -> bool:
    """Whether an embedding looks rows up and at most scales them."""
    if not isinstance(embedding, nn.Embedding):
        return False
    if type(embedding).forward is not nn.Embedding.forward and not hasattr(embedding, "embed_scale"):
        return False
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


class OwnRows:
    """The forward of such an embedding, whose weight ``[V, D]`` lies in parts of rows. Its class's own forward runs."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        self._embedding, self._group = embedding, group
        self._first = -(-embedding.num_embeddings // group.size()) * group.rank()

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the embedding gives for token ids int64 of any shape. Collective."""
        with RowsFrom(self._embedding, self.rows):
            output: torch.Tensor = type(self._embedding).forward(self._embedding, input_ids)
        return output

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for token ids."""
        weight = own_weight(self._embedding)
        places = input_ids - self._first
        foreign = (places < 0) | (places >= len(weight))
        if (padding := self._embedding.padding_idx) is not None:
            padding -= self._first  # its gradient is none's
        if len(weight):
            inside = padding if padding is not None and 0 <= padding < len(weight) else None
            own = functional.embedding(places.masked_fill(foreign, 0), weight, inside)
            own = own.masked_fill(foreign[..., None], 0)
        else:  # of a graph all the same, as on the other processes
            own = weight.new_zeros(*input_ids.shape, weight.shape[1]) + weight.sum()
        return summed(own, self._group)
