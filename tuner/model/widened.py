"""A model in float32 for as long as it is looked at, whatever its weights are kept in, at the cost of what is used."""

import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tuner.model.build import has_score, head_layer
from tuner.model.tokens import TrainableTokens
from tuner.model.wrap import Wrapper, wrapped, wrappers_of
from tuner.runtime.torch_private import changes_in_place

KEPT_BYTES = 2 << 30
"""Of copies in float32 that are kept for the next forward; what is beyond is made again for each."""
LARGE = 1 << 24
"""Elements of an embedding or output layer from which on no more of it is copied than is used."""
ROWS = 8192
"""Rows of a large output layer that are computed: tokens up to there have logits."""
BLOCK = 1 << 21
"""Elements of a linear layer's weight that are cast at once: they stay in the processor's cache for their product."""


class Widened:
    """Has modules compute in float32, each while it runs, with copies of their parameters that several models share."""

    def __init__(self, model: PreTrainedModel, narrow: bool) -> None:
        """With ``narrow``, of a large output layer the first :data:`ROWS` rows are computed alone."""
        self._kept: dict[tuple[int, int, int], torch.Tensor] = {}
        self._left = KEPT_BYTES
        head = None if has_score(model) or not narrow else head_layer(model)
        self._narrowed: set[int] = set()
        """The parameters of an output layer of which the first rows are computed alone."""
        if type(head) is nn.Linear and head.weight.numel() >= LARGE and len(head.weight) > ROWS:
            self._narrowed = {id(parameter) for parameter in head.parameters()}
        self._tokens = int(getattr(model.get_input_embeddings(), "num_embeddings", 0))

    @contextmanager
    def computing(self, root: nn.Module, left_out: Collection[nn.Module] = ()) -> Iterator[None]:
        """Within, each module's own parameters are float32 while it runs; those ``left_out`` never do."""
        idle = {part for module in left_out for part in module.modules()}
        # Rows of new tokens are put into the weight of the layer that they belong to, which does not run itself.
        parts = {m: m.parameters(recurse=isinstance(m, TrainableTokens)) for m in root.modules() if m not in idle}
        own = {m: [p for p in parameters if p.is_floating_point()] for m, parameters in parts.items()}
        before: dict[nn.Module, list[torch.Tensor]] = {}

        def widen(module: nn.Module, inputs: Any) -> None:
            before[module] = [parameter.data for parameter in own[module]]
            for parameter in own[module]:
                parameter.data = self._of(module, parameter, inputs)

        def restore(module: nn.Module, inputs: Any, output: Any) -> None:
            for parameter, data in zip(own[module], before.pop(module, []), strict=False):
                parameter.data = data

        with ExitStack() as hooks:
            for module, parameters in own.items():
                if _is_in_blocks(module):
                    rows = ROWS if id(module.weight) in self._narrowed else len(module.weight)
                    hooks.enter_context(wrapped(module, Wrapper.KERNEL, partial(_in_blocks, module, rows)))
                elif any(parameter.dtype != torch.float32 for parameter in parameters):
                    hooks.callback(module.register_forward_pre_hook(widen).remove)
                    hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
            yield

    def _of(self, module: nn.Module, parameter: nn.Parameter, inputs: Any) -> torch.Tensor:
        data = parameter.data
        if isinstance(module, nn.Embedding) and self._is_of_tokens(module) and inputs and data.dtype != torch.float32:
            return _rows_alone(data, inputs[0])
        if id(parameter) in self._narrowed and type(module) is nn.Linear:
            data = data[:ROWS]
        key = (id(parameter), len(data), changes_in_place(parameter))  # what is changed in place is another one
        if key in self._kept:
            return self._kept[key]
        wide = _copy_of(data)
        if wide.nbytes <= self._left:
            self._kept[key] = wide
            self._left -= wide.nbytes
        return wide

    def _is_of_tokens(self, module: nn.Embedding) -> bool:
        """Whether its rows are those that it is given: embeddings of places may make these of what they are given."""
        return module.weight.numel() >= LARGE and 2 * module.num_embeddings > self._tokens > 0


def _is_in_blocks(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer whose weight is cast a block at a time: a large one that computes as its class."""
    if type(module) is not nn.Linear or wrappers_of(module):
        return False
    return module.weight.dtype in (torch.bfloat16, torch.float16) and module.weight.numel() > BLOCK


def _in_blocks(module: nn.Linear, rows: int, inputs: torch.Tensor) -> torch.Tensor:
    """``[..., rows]`` of a linear layer in float32, some rows of its weight after the others.

    No copy of the weight is made: memory that is new to the process costs several times as much as the cast. No
    gradient goes through it, but what is computed from it is known to have one.
    """
    weight, bias = module.weight.detach()[:rows], module.bias
    step = max(1, BLOCK // weight.shape[1])
    wide = torch.empty((step, weight.shape[1]), dtype=torch.float32)
    with torch.no_grad():
        parts = [F.linear(inputs, wide[: len(block)].copy_(block)) for block in weight.split(step)]
        output = torch.cat(parts, dim=-1)
        if bias is not None:
            output += bias[:rows]
    return output.requires_grad_(inputs.requires_grad)


def _copy_of(data: torch.Tensor) -> torch.Tensor:
    """In float32. numpy asks for large pages: of small ones, taking them costs as much as the cast."""
    wide = torch.from_numpy(np.empty(tuple(data.shape), dtype=np.float32))
    return wide.copy_(data)


def _rows_alone(data: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[V, D]`` in float32 with the rows of ``ids``; the others are zeros that take no memory before they are read.

    Memory of a mapping of its own is zero as it is. What an allocator hands out again it would fill with zeros.
    """
    memory = mmap.mmap(-1, 4 * data.numel())
    wide = torch.frombuffer(memory, dtype=torch.float32).view(data.shape)
    rows = ids.unique()
    wide[rows] = data[rows].float()
    return wide


# How far a model's logits move by rounding alone: what is held to be nothing is measured, not assumed.

_UNIT = 2.0**-23
"""Of float32: twice what a single rounding changes. A layer's output has the roundings of all its sums."""


def rounded_apart(layers: Sequence[nn.Module], logits: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The logits of a model whose layers' hidden states are each rounded once more, by up to a unit of float32.

    A deep model makes more of it than a flat one, and routers choose by it: an expert that gets fewer tokens multiplies
    them by another kernel, which adds up in another order.
    """
    draws = torch.Generator().manual_seed(0)

    def apart(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden, *rest = output if isinstance(output, tuple | list) else (output,)
        if not isinstance(hidden, torch.Tensor):
            return output
        drawn = 2 * torch.rand(hidden.shape, generator=draws, dtype=hidden.dtype) - 1
        hidden = hidden * (1 + _UNIT * drawn.to(hidden.device))
        return type(output)([hidden, *rest]) if isinstance(output, tuple | list) else hidden

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(apart).remove)
        return logits()
