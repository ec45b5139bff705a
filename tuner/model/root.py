"""The module that training calls: decoder, output layer and loss inside one forward.

Under FSDP2 a tied output weight is gathered in the root's forward only, an untied one only in :meth:`CausalLM.at_head`:
losses are computed there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.model import output_layer
from tuner.model.build import decoder_of, has_score, head_layer
from tuner.model.documents import Carried, Documents, GrowingDocuments, Padding
from tuner.model.output_layer import Kernel, Objective, OutputLayer, Result
from tuner.model.row_layout import Positions, RowCut, RowLayout
from tuner.model.vetting import asks_router_logits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tuner.model.router_loss import RouterLoss  # what most models go without
    from tuner.model.touched_rows import TouchedRows


@dataclass
class ModelParts:
    """What training attaches to a model, each set at most once; most models go without most of it."""

    loss_kernel: Kernel = output_layer.softmax_into_gradient
    """What turns logits into the loss of training and its gradient."""
    gradient_scale: Callable[[], torch.Tensor | None] = lambda: None
    """Under fp16: what a term of the loss is multiplied by in the backward pass of the step, a scalar."""
    router_loss: RouterLoss | None = None
    """What balances the experts of a mixture, where that is part of the loss; it holds sums of the last forward."""
    touched_rows: Mapping[str, TouchedRows] = field(default_factory=dict)
    """Of embeddings whose gradients are added up by rows, by the parameter's name."""
    padding: Padding | None = None
    """What every microbatch of training is filled up with, where compiled layers want one size."""
    data_mesh: DeviceMesh | None = None
    """With layers split over processes (tensor parallel): those that have the same part of each as this one."""
    vocabulary: output_layer.Vocabulary | None = None
    """Where processes have the vocabulary's rows of the output layer between them (vocabulary parallel)."""
    cut: RowCut | None = None
    """What cuts rows over processes, each of which has a share of the positions (sequence parallel, as Ulysses cuts
    them); None: a row is on one process."""
    at_gathered_head: Callable[..., Any] | None = None
    """Gathers an output layer that is an FSDP unit of its own, calls :meth:`CausalLM.at_head`, and frees it."""
    max_forwards: Callable[[int], int] = lambda forwards: forwards
    """The largest number of forwards that any rank runs for its micro-batch, from this rank's number: all run as many,
    or the all-gathers of FSDP2 would wait for ever."""
    sum_partial_gradients: Callable[[], None] = lambda: None
    """All-reduces, once a step, the gradients of which each tensor- or sequence-parallel rank has a partial sum."""

    def set_once(self, **made: Any) -> None:
        """Set fields, each at most once and before the first step: do not assign to them. Raises AssertionError."""
        fresh = ModelParts()
        again = [name for name in made if getattr(self, name) != getattr(fresh, name)]
        assert not again, f"{', '.join(again)}: this model has it already"
        for name, value in made.items():
            setattr(self, name, value)


class CausalLM(nn.Module):
    """A transformers language model whose forward gives the objective of one packed microbatch."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.parts = ModelParts()
        self.layout = RowLayout(model)
        self.logit_transform = output_layer.PLAIN if has_score(model) else output_layer.LogitTransform.of(model.config)
        """What the model does to the output layer's products before they are logits."""
        self.before_output = _before_output(model)
        """From the decoder's hidden states to what the output layer takes, where a model computes anything there."""
        self._notes_routers = asks_router_logits(model.config) and _takes_option(model)
        """Whether layers note what routers say unless they are told not to."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_lengths: tuple[int, ...],
        positions: Positions, targets: torch.Tensor,
        objective: Objective[Result] = output_layer.summed_cross_entropy,  # type: ignore[assignment]  # pep 696 comes with 3.13
    ) -> Result:
        """What the ``objective`` makes of the ``positions``: by default the sum of their cross-entropies in nats.

        Shapes: input_ids and position_ids int64 ``[T]``, positions and their targets int64 ``[N]``. Other positions
        never reach the output layer. Tensors with a gradient are found in nests of tuples, lists and dicts alone.
        Where rows are cut, the objective gets this process's share of the hidden states and all targets.
        """
        hidden = self._hidden(input_ids, position_ids, document_lengths)
        return self._call_objective(objective, self._selected(hidden, positions), targets)

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_lengths: tuple[int, ...],
        positions: Positions,
    ) -> torch.Tensor:
        """Logits ``[N, V]`` at the given positions of a packed microbatch; without gradients where they are capped,
        or where several processes have the rows of the output layer.

        Of a reward model, scores ``[N, 1]``.
        """
        hidden = self._selected(self._hidden(input_ids, position_ids, document_lengths), positions)
        if self.parts.cut is not None:
            hidden = self.parts.cut.whole(hidden, len(positions))
        logits: torch.Tensor = head_layer(self.model)(self._before_head(hidden))
        self.logit_transform.apply_(logits)
        return logits

    def next_tokens(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lasts: torch.Tensor, carried: Carried,
        documents: GrowingDocuments | None,
    ) -> torch.Tensor:
        """The likeliest tokens int64 ``[N]`` after the ``lasts`` ``[N]`` of tokens ``[T]`` that continue the
        ``documents`` in ``carried``.

        Without ``documents`` there is one. What the decoder gives back for the next tokens is noted there.
        """
        layout = self.layout
        layout.set_lengths((), input_ids.device)
        if documents is not None:
            layout.set_rotated_lengths(documents.new, documents.whole)
        where = layout.arguments(layout.model_positions(input_ids, position_ids), documents)
        output = decoder_of(self.model)(input_ids=input_ids[None], use_cache=True, **carried.arguments, **where)
        carried.note(output, len(input_ids))
        hidden = output.last_hidden_state[0, lasts]
        if self.parts.vocabulary is not None:
            return self._call_objective(_likeliest_of_parts, hidden, input_ids[:0])
        logits: torch.Tensor = self.model.get_output_embeddings()(self._before_head(hidden))
        self.logit_transform.apply_(logits)
        return logits.argmax(-1)

    def _hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Hidden states ``[T, D]``, where rows are cut those of this process's share of the positions."""
        layout = self.layout
        if self.parts.router_loss is not None:
            self.parts.router_loss.begin(input_ids.device)
        if layout.route != "flat":
            return self._unpacked_hidden(input_ids, document_lengths)
        n_tokens, bound = input_ids.shape[0], None
        cut, padding = self.parts.cut, self.parts.padding
        if padding is not None and self.training:
            input_ids, position_ids, document_lengths = padding.fill(input_ids, position_ids, document_lengths)
            bound = padding.longest
        if cut is not None:
            input_ids, position_ids, document_lengths = cut.fill(input_ids, position_ids, document_lengths)
        layout.set_lengths(document_lengths, input_ids.device, compiled=bound is not None)
        position_ids, token_mask = layout.model_positions(input_ids, position_ids), None
        if n_tokens < len(input_ids):
            token_mask = torch.arange(len(input_ids), device=input_ids.device) < n_tokens
        documents = Documents.of(document_lengths, input_ids.device, bound, layout.chunk)
        if cut is not None:
            documents = cut.exchanging(documents, position_ids)
            input_ids, position_ids = cut.own(input_ids), cut.own(position_ids)
            token_mask = None if token_mask is None else cut.own(token_mask)
        hidden = self._decoder(input_ids[None], token_mask, layout.arguments(position_ids, documents))[0]
        return hidden[:n_tokens] if cut is None else hidden

    def _selected(self, hidden: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The hidden states at N positions, where rows are cut this process's share of them."""
        return hidden[positions] if self.parts.cut is None else self.parts.cut.taken(hidden, positions)

    def _before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output layer takes ``[N, E]``, of the decoder's hidden states ``[N, D]``."""
        return hidden if self.before_output is None else self.before_output(hidden)

    def _unpacked_hidden(self, input_ids: torch.Tensor, document_lengths: tuple[int, ...]) -> torch.Tensor:
        """Hidden states ``[T, D]`` of documents that are not packed end to end: each has a forward or a batch row."""
        from tuner.model.apart import forwards_of, hidden_states  # what most models go without

        forwards = forwards_of(document_lengths, self.layout.route, self.layout.bounds)
        most = self.parts.max_forwards(len(forwards))
        return hidden_states(self._decoded, input_ids, document_lengths, forwards, most)

    def _decoded(self, input_ids: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states ``[documents, longest, D]``; nothing says where tokens stand, as where a document is alone."""
        self.layout.set_lengths((), input_ids.device)
        return self._decoder(input_ids, token_mask, {})

    def _decoder(
        self, input_ids: torch.Tensor, token_mask: torch.Tensor | None, where: Mapping[str, object]
    ) -> torch.Tensor:
        """Hidden states ``[rows, T, D]`` of ids ``[rows, T]``; router logits of the tokens in ``token_mask``
        (all where it is None) go to the router loss."""
        routers, self.layout.token_mask = self.parts.router_loss, token_mask
        noted = {"output_router_logits": routers is not None} if routers is not None or self._notes_routers else {}
        output = decoder_of(self.model)(input_ids=input_ids, use_cache=False, **noted, **where)
        if routers is not None:
            routers.add(output.router_logits, token_mask)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _call_objective(self, objective: Objective[Result], hidden: torch.Tensor, targets: torch.Tensor) -> Result:
        hidden = self._before_head(hidden)
        if self.parts.at_gathered_head is not None:
            result: Result = self.parts.at_gathered_head(objective, hidden, targets)
            return result
        return self.at_head(objective, hidden, targets)

    def at_head(self, objective: Objective[Result], hidden: torch.Tensor, targets: torch.Tensor) -> Result:
        """What the ``objective`` makes of hidden states ``[N, D]`` and the output layer.

        Its weight is whole here, or all that this process has of it where the vocabulary is split.
        """
        head, parts = head_layer(self.model), self.parts
        scale = parts.gradient_scale()
        if parts.vocabulary is not None:
            layer = parts.vocabulary.layer(head, self.logit_transform, scale)
        else:
            hidden, weight = output_layer.as_one_matrix(head, hidden)
            layer = OutputLayer(weight, getattr(head, "bias", None), self.logit_transform, parts.loss_kernel, scale)
        if parts.cut is not None:
            layer = parts.cut.head(layer, len(targets))
        return objective(hidden, layer, targets)


def _takes_option(model: PreTrainedModel) -> bool:
    """Whether a decoder takes options by name that it does not list, or that of its routers."""
    taken = inspect.signature(decoder_of(model).forward).parameters.values()
    return any(one.kind is one.VAR_KEYWORD or one.name == "output_router_logits" for one in taken)


def _before_output(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor] | None:
    parts = [] if has_score(model) else _parts_between(model, decoder_of(model), head_layer(model))
    if not parts:
        return None
    from tuner.model.before_output import before_output

    return partial(before_output, model, parts)


def _parts_between(whole: nn.Module, decoder: nn.Module, head: nn.Module | None) -> list[nn.Module]:
    """The parts of a model that stand between its decoder and its output layer, the last of which may hold it."""
    children = list(whole.children())
    first, last = (
        next((i for i, child in enumerate(children) if any(part is end for part in child.modules())), None)
        for end in (decoder, head)
    )
    if first is None or last is None:
        return []
    if first == last:
        return _parts_between(children[first], decoder, head)
    between = [child for child in children[first + 1 : last] if any(True for _ in child.parameters())]
    return between + [child for child in children[last : last + 1] if child is not head]


def position_losses(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    """As an objective: the cross-entropy at each of the positions, in any order: float32 ``[N]``."""
    return head.losses(hidden, targets)


def _likeliest_of_parts(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> torch.Tensor:
    assert head.parts is not None, "whole logits are the layer's own"
    return head.parts.likeliest(head, hidden)


# Methods besides forward that gather the root's parameters under FSDP2.
FORWARD_METHODS = ("logits", "next_tokens")


def outer_parameters(root: CausalLM) -> set[str]:
    """Names of the parameters of embeddings and of the output layer: what stands at the ends of the network."""
    head = head_layer(root.model)
    return embedding_parameters(root) | _names_in(root.model, [] if head is None else [head])


def embedding_parameters(root: CausalLM) -> set[str]:
    """Names of the parameters of embeddings, an output layer's that are tied to them included."""
    model = root.model
    ends = [model.get_input_embeddings(), *(one for one in model.modules() if isinstance(one, nn.Embedding))]
    return _names_in(model, [one for one in ends if one is not None])


def _names_in(model: nn.Module, modules: Sequence[nn.Module]) -> set[str]:
    found = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}


def trained_parameters(root: CausalLM) -> dict[str, nn.Parameter]:
    """Parameters that are trained, tied ones once, by transformers' name."""
    return {name: p for name, p in root.model.named_parameters() if p.requires_grad}
