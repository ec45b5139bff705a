"""How far a model's logits move by rounding alone: what is held to be nothing is measured, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

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
