"""How a model takes the documents of a row: end to end, or apart; what its layers receive about their positions; and
what a model asks of whoever cuts its rows over processes (:mod:`tuner.parallel.sequence`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.model import attention
from tuner.model.build import decoder_of, position_limit
from tuner.model.documents import Documents, GrowingDocuments
from tuner.model.output_layer import OutputLayer
from tuner.model.transformers_private import keeps_state, masks_by_position, own_attention
from tuner.model.vetting import layers_with_indexers

if TYPE_CHECKING:
    from tuner.model.longrope import RotationByDocument
    from tuner.model.mixers import Mixers


Route = Literal["flat", "batch", "calls"]
"""How the documents of a microbatch go through the decoder: packed end to end (padding-free, attention by lengths), as
a padded batch, or one by one."""


class RowLayout:
    """What a model's layers receive about the documents in a row."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.route: Route = "flat"
        """See :meth:`set_route`."""
        self.takes_documents = attention.is_ours(model.config)
        """Whether the model's layers attend by our functions. Others make masks from the positions, or none."""
        self.chunk, self._count_by_class = _count_by_document(model) if self.takes_documents else (0, None)
        """Tokens of a chunk, in models some of whose layers attend inside chunks alone; 0 in others."""
        self._scales_by_position = any(hasattr(module, "tuner_temperature") for module in model.modules())
        self.padding_number = _padding_number(model)
        """The padding token's id, where tokens are numbered from it on (RoBERTa and its kin)."""
        self._rotation: RotationByDocument | None = None
        """What rotates each document by the factors of its own length, in a model that has several."""
        if rotates_by_length(model):
            from tuner.model.longrope import RotationByDocument  # what most models go without

            self._rotation = RotationByDocument(model)
        self.mixers: Mixers | None = None
        """The layers with a state, such as Mamba's or linear attention's, where there are any."""
        if keeps_state(model):
            from tuner.model.mixers import Mixers

            self.mixers = Mixers(model)
        self.takes_positions = takes_positions(model)
        """Without them, tokens are numbered from the start of the row."""
        self.token_mask: torch.Tensor | None = None
        """bool ``[tokens]`` of the last forward: False where a document or a row is filled up; None: all count."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Document lengths at which longrope switches to other rotary factors."""
        return () if self._rotation is None else self._rotation.bounds

    def set_route(self, route: Route) -> None:
        """Have documents go through the decoder by another route from now on, in place.

        Where they do not lie end to end, the model attends as its class does, with the class's masks: each document is
        then computed as transformers computes it alone.
        """
        if route != "flat" and self.takes_documents:
            self._model.set_attn_implementation(own_attention(self._model))
            self.takes_documents, self.chunk, self._scales_by_position = False, 0, False
            if self._count_by_class is not None:
                self._count_by_class(decoder_of(self._model))
        self.route = route

    def set_lengths(self, lengths: tuple[int, ...], device: torch.device, compiled: bool = False) -> None:
        """The next forward has documents of these ``lengths`` end to end; without any, each is alone."""
        self.set_rotated_lengths(lengths, lengths)
        if self.mixers is not None:
            self.mixers.expect(lengths, device, compiled=compiled)

    def set_rotated_lengths(self, new: tuple[int, ...], whole: tuple[int, ...]) -> None:
        """For longrope when decoding: ``new`` tokens of each document now, ``whole`` lengths once they are there."""
        if self._rotation is not None:
            self._rotation.expect(new, whole)

    def model_positions(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The model's own position ids ``[T]``, from those of each document, which begin at 0."""
        if self.padding_number is None:
            return position_ids
        return from_padding(input_ids, position_ids, self.padding_number)

    def arguments(
        self, position_ids: torch.Tensor, documents: Documents | GrowingDocuments | None
    ) -> dict[str, object]:
        """What this model takes besides ids: its keyword arguments of positions and documents."""
        is_flat = self.route == "flat"
        where: dict[str, object] = {"position_ids": position_ids[None]} if self.takes_positions and is_flat else {}
        where |= {"places": position_ids[None]} if self._scales_by_position and is_flat else {}
        return where | ({"documents": documents} if self.takes_documents else {})


def route_of(model: PreTrainedModel) -> tuple[Route, str | None]:
    """The route that a model's structure tells, and why documents cannot lie end to end; None where they may.

    What training computes is proven when it starts (:func:`~tuner.model.probe.prove_route`); until then, and where
    nothing has numbers, this holds on every process alike.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if layers_with_indexers(model.config):
        return "batch", f"{name} chooses what each token sees by an indexer, which reads a mask"
    if keeps_state(model):  # mixers of tokens get documents apart
        return "flat", None
    if "lsh" in (getattr(config, "attn_layers", None) or ()):
        return "calls", f"{name} sorts the tokens of a sequence to attend"
    decoder = decoder_of(model)
    counts = any("PositionalEmbedding" in type(module).__name__ for module in decoder.modules())
    if counts and "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "batch", f"{name} numbers tokens by their place in the row"
    if not attention.is_ours(model.config) and not masks_by_position(decoder):
        return "batch", f"{name} has attention of its own"
    if _masks_by_table(decoder, position_limit(model.config)):
        return "batch", f"{name} masks by a table of its positions, which rows end to end are longer than"
    return "flat", None


def from_padding(ids: torch.Tensor, position_ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Numbers that RoBERTa and its kin give to tokens: from ``padding`` + 1 on, and ``padding`` to padding tokens.

    Shapes: ids and position_ids int64 ``[T]``, the latter from 0 on in each document; result the same. A padding
    token inside a document is not counted.
    """
    is_padding = (ids == padding).long()
    before = is_padding.cumsum(0) - is_padding
    first = torch.arange(len(ids), device=ids.device) - position_ids
    # A document that continues one in a cache began before these tokens.
    skipped = torch.where(first < 0, 0, before - before[first.clamp_min(0)])
    return (position_ids + 1 - skipped) * (1 - is_padding) + padding


def rotates_by_length(model: nn.Module) -> bool:
    """Whether a model rotates documents by factors that depend on their length."""
    return any("longrope" in str(getattr(module, "rope_type", "")) for module in model.modules())


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model's decoder is given the numbers of tokens, and does not number them from the start of the row."""
    given = inspect.signature(decoder_of(model).forward).parameters.values()
    return any(one.name == "position_ids" or one.kind is one.VAR_KEYWORD for one in given)


def _count_by_document(model: PreTrainedModel) -> tuple[int, Callable[[nn.Module], None] | None]:
    """Have layers that count tokens do so inside documents, in place; the tokens of a chunk, 0 without chunks, and what
    has a decoder's layers count as their class does again."""
    if not attention.counts_tokens(model.config):
        return 0, None
    from tuner.model.counted import count_by_class, count_by_document  # few models do

    return count_by_document(decoder_of(model), model.config), count_by_class


def _padding_number(model: PreTrainedModel) -> int | None:
    """What ``create_position_ids_from_input_ids`` of fairseq's embeddings counts from."""
    rule = "create_position_ids_from_input_ids"
    counting: list[Any] = [module for module in decoder_of(model).modules() if hasattr(type(module), rule)]
    return next((int(module.padding_idx) for module in counting), None)


def _masks_by_table(decoder: nn.Module, positions: int | None) -> bool:
    """Whether a layer holds a mask ``[..., positions, positions]``: GPT-Neo's is cut to the length of the whole row.

    What the decoder itself holds is not a layer's: GPT-BigCode keeps one that it does not read.
    """
    layers = (module for module in decoder.modules() if module is not decoder)
    held = (buffer for layer in layers for buffer in layer.buffers(recurse=False) if buffer.ndim > 1)
    return any(tuple(buffer.shape[-2:]) == (positions, positions) for buffer in held)


Positions = torch.Tensor | npt.NDArray[np.int64]
"""int64 ``[N]``: on the device, or on the host, where nobody waits for the device to learn who has them."""


class RowCut(Protocol):
    """A row of T tokens in equal shares of t positions."""

    def fill(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Ids and positions of a row that can be cut, and the lengths of its documents."""

    def exchanging(self, documents: Documents, position_ids: torch.Tensor) -> Documents:
        """The documents of a whole row ``[T]``, for layers that see a share of it."""

    def own(self, of_row: torch.Tensor) -> torch.Tensor:
        """This process's share ``[t, ...]`` of what is there for each position ``[T, ...]``."""

    def taken(self, hidden: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Of hidden states ``[t, D]`` on each process those at N positions, in order, in even shares ``[n, D]``."""

    def whole(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """All of what was taken, ``[N, D]``, from this process's share ``[n, D]``."""

    def head(self, layer: OutputLayer, count: int) -> OutputLayer:
        """An output layer for shares of N positions."""
