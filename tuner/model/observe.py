"""What a model's layers compute, observed in a forward of its own, without gradients and dropout.

Training computes its steps as it always does, compiled, recomputed and with fused kernels, and is not touched: layers
that are compiled or recomputed run as they are in a forward without gradients, so that hooks inside of them are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tuner.model.attention import Attended
from tuner.model.build import decoder_blocks, decoder_of
from tuner.model.experts import routed_experts
from tuner.model.output_layer import no_objective
from tuner.model.root import CausalLM
from tuner.model.router_loss import has_term
from tuner.runtime.device import to_device

ROWS = 128
"""Rows of the table of attention logits that are computed: queries that lie side by side, with all keys they see."""
_OBSERVER = "tuner_observer"
"""What `packed_attention` looks for on the module that calls it."""
_GATE = "gate_proj"
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Modules that define what an MLP calls between its projections."""


@dataclass(frozen=True)
class RouterShares:
    """What one router said of all tokens of a forward."""

    chosen: torch.Tensor
    """float64 [E]: how many tokens each expert was chosen by."""
    said: torch.Tensor | None = None
    """float64 [2]: sums over tokens of the entropy of its probabilities, in nats, and of the mean of its logits. None
    where the class does not give what its routers say, and their choices alone are seen."""
    largest: torch.Tensor | None = None
    """Its largest logit, a float32 scalar."""

    def plus(self, old: RouterShares | None) -> RouterShares:
        """With what it said of other tokens before."""
        if old is None:
            return self
        if self.said is None or old.said is None or self.largest is None or old.largest is None:
            return RouterShares(old.chosen + self.chosen)
        return RouterShares(old.chosen + self.chosen, old.said + self.said, torch.maximum(old.largest, self.largest))


@dataclass
class Observation:
    """Of one forward, by the index of a decoder layer, as far as the layer has it; tensors on the device."""

    squares: dict[int, torch.Tensor] = field(default_factory=dict)
    """The sum of squares of a layer's output ``[T, D]``, float64 scalars."""
    elements: dict[int, int] = field(default_factory=dict)
    """How many numbers that output has."""
    largest_logit: dict[int, torch.Tensor] = field(default_factory=dict)
    """The largest attention logit in the rows that were computed: scaled, before soft bounds and biases."""
    alive: dict[int, torch.Tensor] = field(default_factory=dict)
    """bool [units]: of an MLP's hidden units, those whose activation is above zero for any token."""
    routers: dict[int, RouterShares] = field(default_factory=dict)
    per_token: int = 0
    """Experts that each token goes to."""


@torch.no_grad()
def observe(
    root: CausalLM, input_ids: torch.Tensor, position_ids: torch.Tensor, document_lengths: tuple[int, ...],
    rows_at: float,
) -> Observation:
    """Observe one forward of a packed microbatch ``[T]``; under FSDP2 it is collective, as every forward is.

    Attention logits are those of :data:`ROWS` queries, which begin at the share ``rows_at`` of the row. Leaves the
    model in evaluation mode; of its weights and buffers nothing changes.
    """
    blocks = decoder_blocks(root.model, "logging.internals")
    found = Observation()
    nothing = torch.zeros(0, dtype=torch.int64, device=input_ids.device)
    root.eval()
    with _taps(root, blocks, found, rows_at):
        root(input_ids, position_ids, document_lengths, nothing, nothing, no_objective)
    return found


@contextmanager
def _taps(root: CausalLM, blocks: Sequence[nn.Module], found: Observation, rows_at: float) -> Iterator[None]:
    """Within, forwards of the model are noted in ``found``."""
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            # Before FSDP2's own hook, which frees the layer's weights.
            stack.callback(block.register_forward_hook(partial(_note_output, found, index), prepend=True).remove)
            for module in hidden_units(block):
                stack.callback(module.register_forward_hook(partial(_note_alive, found, index)).remove)
            for module in block.modules():
                vars(module)[_OBSERVER] = partial(_note_logits, found, index, rows_at)
                stack.callback(vars(module).pop, _OBSERVER)
        if _tells_routers(root):
            decoder, note = decoder_of(root.model), partial(_note_routers, root, blocks, found)
            ask = decoder.register_forward_pre_hook(
                lambda _, inputs, named: (inputs, named | {"output_router_logits": True}), with_kwargs=True
            )
            stack.callback(ask.remove)
            stack.callback(decoder.register_forward_hook(note).remove)
        else:
            for index, block in enumerate(blocks):
                for module in routed_experts(block).values():
                    note = partial(_note_choices, root, found, index)
                    stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def hidden_units(block: nn.Module) -> list[nn.Module]:
    """The modules of a layer whose output says which hidden units of an MLP are active: above zero.

    Of a gated MLP the gate's projection, whichever kernel applies the activation to it; else the activation. Experts
    that are one tensor for all have none.
    """
    if gates := [module for name, module in block.named_modules() if name.rpartition(".")[2] == _GATE]:
        return gates
    owners = [one for one in block.modules() if any(p.ndim > 2 for p in one.parameters(recurse=False))]
    fused = {part for owner in owners for part in owner.modules()}
    return [part for part in block.modules() if type(part).__module__ in _ACTIVATIONS and part not in fused]


def _tells_routers(root: CausalLM) -> bool:
    """Whether the decoder gives back what its routers say."""
    given = inspect.signature(decoder_of(root.model).forward).parameters.values()
    return has_term(type(root.model)) and any(one.kind is one.VAR_KEYWORD for one in given)


def _note_output(found: Observation, index: int, block: nn.Module, inputs: object, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    squares = hidden.detach().float().square().sum(dtype=torch.float64)
    found.squares[index] = found.squares.get(index, 0.0) + squares
    found.elements[index] = found.elements.get(index, 0) + hidden.numel()


def _note_alive(found: Observation, index: int, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    alive = (output.detach() > 0).flatten(0, -2).any(0)
    before = found.alive.get(index)
    if before is not None and len(before) == len(alive):  # of the tiles of a row, or of several MLPs of a layer
        alive = alive | before
    found.alive[index] = alive


def _note_choices(
    root: CausalLM, found: Observation, index: int, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Count what the experts of a layer are asked for, in a class that does not give what its routers say."""
    choices = [*inputs, *named.values()][1]  # by place: classes have other names for it
    found.per_token = choices.shape[-1]
    if root.layout.token_mask is not None and root.layout.route != "flat":
        choices = choices.flatten(0, -2)[root.layout.token_mask.flatten()]
    asked = choices.flatten()
    hits = torch.zeros(int(module.num_experts), dtype=torch.float64, device=asked.device)
    hits.scatter_add_(0, asked, torch.ones_like(asked, dtype=torch.float64))
    found.routers[index] = RouterShares(hits).plus(found.routers.get(index))


def _note_logits(found: Observation, index: int, rows_at: float, attended: Attended) -> None:
    largest = largest_logit(attended, rows_at)
    before = found.largest_logit.get(index)
    found.largest_logit[index] = largest if before is None else torch.maximum(before, largest)


def largest_logit(attended: Attended, rows_at: float, rows: int = ROWS) -> torch.Tensor:
    """The largest logit of so many queries, which begin at a share of the row, over all keys that they see.

    A float32 scalar. One head of keys at a time: what is in memory is ``[heads / kv_heads, rows, keys]``.
    """
    query, key, window = attended.query, attended.key, attended.window
    n_tokens, groups = query.shape[1], query.shape[0] // key.shape[0]
    rows = min(rows, n_tokens)
    start = int(rows_at * (n_tokens - rows + 1))
    places = torch.arange(start, start + rows, dtype=torch.int32)
    bounds = attended.documents.host
    first = bounds[torch.searchsorted(bounds, places, right=True) - 1]
    if window:
        first = torch.maximum(first, places - window + 1)
    low = int(first.min())
    keys = torch.arange(low, start + rows, dtype=torch.int32)
    hidden = to_device(~((keys >= first[:, None]) & (keys <= places[:, None])), query.device)
    scale = query.shape[-1] ** -0.5 if attended.scaling is None else attended.scaling
    found = []
    with torch.autocast(query.device.type, enabled=False):
        for head in range(key.shape[0]):
            asking = query[head * groups : (head + 1) * groups, start : start + rows].float()
            scores = asking @ key[head, low : start + rows].float().T * scale
            found.append(scores.masked_fill_(hidden, -torch.inf).amax())
    return torch.stack(found).amax()


def _note_routers(
    root: CausalLM, blocks: Sequence[nn.Module], found: Observation, decoder: nn.Module, inputs: object, output: Any
) -> None:
    """Count the choices, and add up entropies and logits, of tokens that count."""
    names = [{name.rpartition(".")[2] for name, _ in block.named_modules()} for block in blocks]
    layers = [index for index, own in enumerate(names) if "experts" in own]
    logits: Sequence[torch.Tensor] = output.router_logits
    own: Any = root.model
    found.per_token, counted = int(own.num_experts_per_tok), root.layout.token_mask
    if len(logits) != len(layers):
        return  # which layer is whose cannot be said
    for index, layer in zip(layers, logits, strict=True):
        values = layer.float()
        shares = torch.softmax(values, -1)
        hits = torch.zeros_like(shares, dtype=torch.float64)
        hits.scatter_(1, shares.topk(found.per_token, -1).indices, 1.0)
        said = torch.stack([torch.special.entr(shares).sum(-1, dtype=torch.float64), values.double().mean(-1)])
        if counted is not None:
            hits, said = hits * counted[:, None], said * counted
            values = values.masked_fill(~counted[:, None], -torch.inf)
        new = RouterShares(hits.sum(0), said.sum(1), values.amax())
        found.routers[index] = new.plus(found.routers.get(index))
