"""What stays outside of compiled layers: code that asks the device how much there is to do.

A loop over the experts that some token chose is another program for each micro-batch. A module whose own forward has
one is left to the interpreter, and the layer around it is compiled in two pieces. A module that hands such counts on,
as numbers of Python's, would have all after it compiled again for each of them: its model is not compiled.
"""

from __future__ import annotations

import torch
from torch import nn

_ASKS = frozenset({"nonzero", "item"})
_HANDS_ON = "tolist"


def handing_on_counts(model: nn.Module) -> str | None:
    """The class of a module whose forward makes Python's numbers of what the device computed; None: there is none."""
    return next((type(each).__name__ for each in model.modules() if _HANDS_ON in _names(each)), None)


def keep_outside(block: nn.Module) -> None:
    """Leave to the interpreter, in place, what asks the device how much there is to do."""
    for module in block.modules():
        if not _ASKS.isdisjoint(_names(module)):
            module.forward = torch.compiler.disable(module.forward)


def _names(module: nn.Module) -> tuple[str, ...]:
    """What the forward of its class reads; of one that dispatches to grouped products, what the dispatch reads."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_names
