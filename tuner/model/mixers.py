"""Recurrent layers in packed rows: what mixes tokens by a state of its own gets each document as a row of a batch.

Mamba mixers, gated delta rules, short convolutions, time mixing and their kin carry a state from token to token and
know nothing of documents. Here each of them is given the documents of a row as a batch ``[documents, longest, ...]``,
padded at the end, where no token of a document sees it, and its results are put back into the order of the row. So
states and convolutions start from nothing in every document, whatever kernel computes the layer; norms, attention,
MLPs and experts keep the flat row.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.documents import side_by_side
from tuner.model.transformers_private import decoder_classes
from tuner.model.wrap import Wrapper, names_in, wrap
from tuner.runtime.device import to_device

_STATES = {"cache_params", "past_key_values", "past_key_value", "state", "use_cache"}
"""How forwards of transformers name what they carry from one call to the next."""
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a forward looks its attention function up in."""
_CONVOLUTION = "update_conv_state"
"""How a cache takes the last tokens that a convolution will need."""
_SHORT = 64
"""Documents of at most so many tokens share a batch: another call costs more than their padding."""
_LAYOUT = "mixed_documents"


@dataclass(eq=False)  # of a frozen one the compiler would guard every field
class MixerLayout:
    """Where the documents of one row of ``tokens`` lie, and the batches that they make: index tensors on its device.

    An own type, not a tuple: what wraps a module moves and copies the tensors of a tuple.
    """

    tokens: int
    shapes: tuple[tuple[int, int], ...]
    """Of each batch: documents, and tokens of its longest."""
    taken: tuple[torch.Tensor, ...]
    """Of each batch: int64 [documents x longest], the token of the row that stands there; padding repeats the last."""
    order: torch.Tensor
    """int64 [tokens]: where each token of the row stands in the batches, laid end to end."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> "MixerLayout":
        """The layout of documents of these lengths."""
        sizes = np.array(lengths, dtype=np.int64)
        starts = sizes.cumsum() - sizes
        shapes, taken, order, before = [], [], np.empty(sizes.sum(), dtype=np.int64), 0
        for group in batches(lengths):
            token, is_token = side_by_side(starts[group], sizes[group])
            order[token[is_token]] = before + np.flatnonzero(is_token)
            shapes.append(token.shape)
            taken.append(to_device(token.ravel(), device))
            before += token.size
        return MixerLayout(len(order), tuple(shapes), tuple(taken), to_device(order, device))

    def holds(self, value: object) -> bool:
        """Whether a value is a tensor ``[1, tokens, ...]`` of the row."""
        return isinstance(value, torch.Tensor) and value.shape[:2] == (1, self.tokens)

    def batch(self, value: Any, index: int) -> Any:
        """The tensors of the row in a nest of tuples, lists and dicts, as ``[documents, longest, ...]`` of a batch."""
        if isinstance(value, dict):
            return {key: self.batch(part, index) for key, part in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.batch(part, index) for part in value)
        if not self.holds(value):
            return value
        return value[0].index_select(0, self.taken[index]).unflatten(0, self.shapes[index])

    def row(self, parts: Sequence[Any]) -> Any:
        """What a layer made of each batch, as it would have made it of the row: ``[1, tokens, ...]`` in its order.

        Results without tokens are states, of which training keeps none: they become None.
        """
        first = parts[0]
        if type(first) in (tuple, list):
            return type(first)(self.row(each) for each in zip(*parts, strict=True))
        if not isinstance(first, torch.Tensor) or first.shape[:2] != self.shapes[0]:
            return None
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self.order)[None]


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of documents by batch, longest first: none has less than half the tokens of the longest in its batch.

    So there is less padding than there are tokens, in at most log2(longest / 64) + 2 batches. Short documents share
    one whatever their lengths.
    """
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[found[-1][0]] if found else 0
        if found and (2 * lengths[i] >= longest or longest <= _SHORT):
            found[-1].append(i)
        else:
            found.append([i])
    return found


class Mixers:
    """The layers of a model that mix tokens by a state of their own; they follow the documents of each forward.

    A decoder layer carries the layout that it was called with through its own forward, so that one that is computed
    again in the backward pass sees the same documents, whatever row came after.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        found = dict(token_mixers(model))
        self.names = tuple(found)
        """Of the layers, in the model."""
        self._layout: MixerLayout | None = None
        for module in found.values():
            self._by_document(module)
        for block in _blocks(model) if found else ():
            self._carry_layout(block)

    def expect(self, lengths: Sequence[int], device: torch.device, compiled: bool = False) -> None:
        """The next forward has documents of these lengths; with one, or none given, its row is left as it is.

        One is laid out, too, for layers that are ``compiled``: they would be compiled again for none.
        """
        self._layout = MixerLayout.of(lengths, device) if self.names and (compiled or len(lengths) > 1) else None

    def keep_from_compiler(self, model: nn.Module) -> None:
        """Have the layers run outside of compiled graphs, which would be made for one number of documents."""
        for name in self.names:
            module = model.get_submodule(name)
            wrap(module, Wrapper.UNCOMPILED, torch.compiler.disable(module.forward))

    def _by_document(self, module: nn.Module) -> None:
        own = module.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            layout = self._layout
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if layout is None:
                return own(*args, **kwargs)
            if not layout.holds(first):  # xLSTM evaluates long rows in pieces
                raise RecipeError(
                    f"{type(module).__name__} gets a part of a row of {layout.tokens:,} tokens, and no documents",
                    hint="set a smaller data.max_length, or data.packing: false and train.micro_batch_size: 1",
                )
            # The bounds that attention gets are those of the row, not of a batch.
            told = {key: value for key, value in kwargs.items() if key != "documents"}
            given = [layout.batch((args, told), i) for i in range(len(layout.shapes))]
            return layout.row([own(*some, **named) for some, named in given])

        wrap(module, Wrapper.DOCUMENTS, forward)

    def _carry_layout(self, block: nn.Module) -> None:
        own = block.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._layout = kwargs.pop(_LAYOUT)
            return own(*args, **kwargs)

        def hand_over(block: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, _LAYOUT: self._layout}

        wrap(block, Wrapper.DOCUMENTS, forward)
        block.register_forward_pre_hook(hand_over, with_kwargs=True)


def token_mixers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each layer that carries a state over tokens and is not attention.

    They are the innermost modules whose forward takes a state and does not look attention up in transformers'
    interface. Inside of attention those alone that convolve (in Zaya, in Inkling): what else has a state there chooses
    keys by their number.
    """
    keeping = [(name, module) for name, module in model.named_modules() if name and _takes_state(module)]
    attending = tuple(f"{name}." for name, module in keeping if _attends(module))
    blocks = _blocks(model)
    for name, module in keeping:
        innermost = not any(other.startswith(f"{name}.") for other, _ in keeping)
        outside = not name.startswith(attending)
        if innermost and not _attends(module) and (outside or _convolves(module)) and module not in blocks:
            yield name, module


def _takes_state(module: nn.Module) -> bool:
    return not _STATES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _attends(module: nn.Module) -> bool:
    return _INTERFACE in names_in(inspect.unwrap(type(module).forward))


def _convolves(module: nn.Module) -> bool:
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution or _CONVOLUTION in names_in(inspect.unwrap(type(module).forward))


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers. Mamba names the mixers inside of them too, which are none."""
    named = [(name, each) for name, each in model.named_modules() if type(each).__name__ in decoder_classes(model)]
    inside = tuple(f"{name}." for name, _ in named)
    return [each for name, each in named if not name.startswith(inside)]
