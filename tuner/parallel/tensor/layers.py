"""The forwards of split layers: products with this process's part of a weight, and what processes exchange around them.

A module stays what it is, and gets a forward of its own; its weight is a DTensor over the processes of the group, of
which the product takes the local part. So names, shapes and types are those of the whole model to whoever asks.
"""


from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tuner.model.table import LookedUp
from tuner.parallel.exchange import Group
from tuner.parallel.tensor.collectives import entered, gathered, own_part, summed


class SharedInput:
    """What the layers of a part that take the same input share: its gradient is added up over processes once.

    What was entered is kept until another input comes, or the part's forward ends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._given: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The input as a layer takes it of which each process computes a part."""
        if self._entered is None or given is not self._given:
            self._given, self._entered = given, entered(given, self._group)
        return self._entered

    def clear_after(self, module: nn.Module) -> None:
        """Keep nothing beyond a module's forward, however that ends."""
        module.register_forward_hook(self._clear, always_call=True)

    def _clear(self, *_: object) -> None:
        self._given = self._entered = None


def own_weight(layer: nn.Module) -> torch.Tensor:
    """This process's part of a layer's weight."""
    found = held(layer.weight)  # type: ignore[arg-type]  # modules' attributes have no types
    assert found is not None
    return found


def held(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As :func:`tuner.runtime.parts.local`, in words that the compiler follows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Columns:
    """The forward of a linear layer of which each process has some outputs: ``[..., in]`` to ``[..., out / T]``."""

    def __init__(self, layer: nn.Linear, enter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._layer, self.enter = layer, enter

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """This process's outputs."""
        return functional.linear(self.enter(given), own_weight(self._layer), held(self._layer.bias))


class GatheredColumns(Columns):
    """The same where all outputs are gathered: ``[..., in]`` to ``[..., out]``."""

    def __init__(self, layer: nn.Linear, enter: Callable[[torch.Tensor], torch.Tensor], group: Group) -> None:
        super().__init__(layer, enter)
        self._group = group

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """All outputs."""
        return gathered(super().__call__(given), self._group)


class RowParallel:
    """The forward of a linear layer that takes some inputs on each process: ``[..., in / T]`` to ``[..., out]``.

    Its bias is whole everywhere, and is added to the sum.
    """

    def __init__(self, layer: nn.Linear, group: Group) -> None:
        self._layer, self._group = layer, group

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The whole product of this process's inputs and all others'."""
        total = summed(functional.linear(given, own_weight(self._layer)), self._group)
        bias = self._layer.bias
        return total if bias is None else total + bias.to(total.dtype)


class RowsOfOwn(RowParallel):
    """The same where every process has the whole input: ``[..., in]`` to ``[..., out]``."""

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """The whole product."""
        return super().__call__(own_part(given, self._group))


class OwnDropout(nn.Dropout):
    """Dropout of this process's part of an input: the mask is drawn for all of it, as one process draws it."""

    def __init__(self, share: float, group: Group) -> None:
        super().__init__(share)
        self._group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """The part ``[..., n]`` with its part of the mask."""
        if not self.training or self.p == 0:
            return input
        ones = input.new_ones(*input.shape[:-1], input.shape[-1] * self._group.size())
        return input * own_part(functional.dropout(ones, self.p), self._group)


def repeat_heads(layer: nn.Module, own: slice, enter: SharedInput) -> None:
    """Have a layer computed whole on each process, which hands the columns of its ``own`` heads on, in place.

    Each process has that part of its parameters' gradients that comes through these heads.
    """

    def choose(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output[..., own]

    layer.register_forward_pre_hook(lambda module, given: (enter(given[0]), *given[1:]))
    layer.register_forward_hook(choose)


def gather_heads(norm: nn.Module, group: Group) -> None:
    """Have a norm over all heads see them all, and hand this process's own on, in place."""
    norm.register_forward_pre_hook(lambda module, given: (gathered(given[0], group), *given[1:]))
    norm.register_forward_hook(lambda module, given, output: own_part(output, group))


# An embedding of whose rows each process has some: the rows that it lacks are zeros, and a sum brings them together.
#
# A row is on one process of a group alone: added to zeros it stays what it is. Its gradient is whole on each of them,
# and each takes that of its own rows.

class OwnRows(LookedUp):
    """The forward of a plain embedding whose weight ``[V, D]`` lies in parts of rows. Collective."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__(embedding)
        self._group = group
        self._first = -(-embedding.num_embeddings // group.size()) * group.rank()

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for token ids."""
        weight = own_weight(self.embedding)
        places = input_ids - self._first
        foreign = (places < 0) | (places >= len(weight))
        if (padding := self.embedding.padding_idx) is not None:
            padding -= self._first  # its gradient is none's
        if len(weight):
            inside = padding if padding is not None and 0 <= padding < len(weight) else None
            own = functional.embedding(places.masked_fill(foreign, 0), weight, inside)
            own = own.masked_fill(foreign[..., None], 0)
        else:  # of a graph all the same, as on the other processes
            own = weight.new_zeros(*input_ids.shape, weight.shape[1]) + weight.sum()
        return summed(own, self._group)
