"""The gradient of an embedding by the rows that a step touches, in the place of one as large as the whole table.

Which rows a step touches is known before its first forward pass, from the tokens of its global batch. Each gets a slot,
in the order of the rows; the gradients of a row's tokens are added up in its slot, over the micro-batches of the step.
There is room for as many rows as a step can have tokens: the sizes of all tensors follow from the recipe alone, and
nobody asks the device how many rows there are.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.freeze import select
from tuner.model.table import LookedUp, can_be_looked_up
from tuner.model.wrap import Wrapper, wrap

KEY = "optimizer.rows"


class TouchedRows:
    """The rows of an embedding's weight ``[V, D]`` that a step touches, and their gradient.

    ``most`` is the number of tokens of a step's global batch at most. A process may hold only some of the rows
    (:meth:`hold`), and then has their gradient alone.
    """

    def __init__(self, embedding: nn.Embedding, most: int) -> None:
        self.embedding, self.most = embedding, most
        self.first, self.count = 0, embedding.num_embeddings
        self.rows: torch.Tensor | None = None
        """int64 ``[room]``: the row in each slot, counted from the first that is held; their number in empty slots."""
        self.gradient: torch.Tensor | None = None
        """``[room, D]``: the gradient of the row in each slot, zeros in empty ones; None before a backward pass."""
        self._slots: torch.Tensor | None = None

    @property
    def indices(self) -> list[torch.Tensor]:
        """What says which row has which slot."""
        return [index for index in (self.rows, self._slots) if index is not None]

    def hold(self, first: int, count: int) -> None:
        """Say which rows this process holds, where it does not hold all."""
        self.first, self.count = first, count

    @property
    def room(self) -> int:
        """Slots: the rows that a step can touch of those that are held."""
        return min(self.most, self.count)

    def begin(self, present: torch.Tensor) -> None:
        """Give slots to the rows of a step, uint8 ``[V]``: 1 for those that are looked up in it, on any process."""
        own = present[self.first : self.first + self.count].bool()
        slots = own.cumsum(0, dtype=torch.int32).sub_(1).masked_fill_(own.logical_not_(), self.room)
        numbers = torch.arange(self.count, device=slots.device)
        rows = torch.full((self.room + 1,), self.count, dtype=torch.int64, device=slots.device)
        self.rows = rows.scatter_(0, slots.long(), numbers)[: self.room]
        self._slots = functional.pad(slots, (0, 1), value=self.room)  # the last one: of rows that are not held here
        self.gradient = None

    def add(self, places: torch.Tensor, upstream: torch.Tensor) -> None:
        """Add up the gradients ``[T, D]`` of what was looked up at ``places`` ``[T]``, counted from the first row held.

        Their number stands for rows of others. Sums are in the order of tokens, as those of torch's own embedding; a
        micro-batch's sum is added to that of those before, as autograd does.
        """
        if self._slots is None:
            raise RuntimeError("rows have gradients in steps alone, and none has begun")
        # What has no slot has a row of its own at the end. On CUDA this sorts: the order of sums is fixed.
        found = torch.ops.aten.embedding_dense_backward(
            upstream, self._slots[places], self.room + 1, self.room, False
        )[: self.room]
        self.gradient = found if self.gradient is None else self.gradient.add_(found)

    def drop(self) -> None:
        """End the step: there is no gradient any more."""
        self.rows = self.gradient = self._slots = None


class ByRows(LookedUp):
    """The forward of an embedding that is whole here, whose gradient is added up by rows."""

    def __init__(self, touched: TouchedRows) -> None:
        super().__init__(touched.embedding)
        self.touched = touched

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight for token ids."""
        apply = cast("Callable[..., torch.Tensor]", _Rows.apply)
        return apply(self.touched.embedding.weight, input_ids, self.touched)


class _Rows(torch.autograd.Function):
    """Rows ``[..., D]`` of a weight, which gets no gradient by autograd."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, input_ids: torch.Tensor, touched: TouchedRows) -> torch.Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(input_ids)
            ctx.touched = touched
        return functional.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, None, None]:
        (input_ids,) = ctx.saved_tensors
        ctx.touched.add(input_ids.reshape(-1), upstream.reshape(-1, upstream.shape[-1]))
        return None, None, None


def by_rows(model: PreTrainedModel, patterns: Sequence[str], most: int) -> dict[str, TouchedRows]:
    """Have the gradients of embeddings added up by rows, in place; what holds them, by the parameter's name.

    ``most`` is the number of tokens of a global batch at most. Raises RecipeError as :func:`row_tables`.
    """
    found = {name: TouchedRows(table, most) for name, table in row_tables(model, patterns).items()}
    for touched in found.values():
        wrap(touched.embedding, Wrapper.ROWS, ByRows(touched))
    return found


def row_tables(model: PreTrainedModel, patterns: Sequence[str]) -> dict[str, nn.Embedding]:
    """The embeddings of input tokens that patterns mean, by their parameters' names.

    Raises RecipeError for a pattern that means nothing that is trained, or anything else than such an embedding.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names, embedding = select(patterns, trained, KEY), model.get_input_embeddings()
    tables = {table.weight: table for table in embedding.modules() if isinstance(table, nn.Embedding)}
    for name in names:
        if (table := tables.get(trained[name])) is None:
            raise RecipeError(
                f"{KEY}: {name} is no embedding of input tokens: every step touches all of its rows",
                hint="name the input embedding alone, such as embed_tokens",
            )
        others = (own for one in model.modules() if one is not table for own in one.parameters(recurse=False))
        if any(own is trained[name] for own in others):
            raise RecipeError(
                f"{KEY}: {name} is the weight of the output layer too (tie_word_embeddings), whose gradient touches "
                "every row in every step",
                hint="leave optimizer.rows out, or take a model whose output layer has a weight of its own",
            )
        if not can_be_looked_up(table):
            raise RecipeError(
                f"{KEY}: {name} is in a {type(table).__name__} that does more than look up and scale float32 rows",
                hint="leave optimizer.rows out",
            )
    return {name: tables[trained[name]] for name in names}


