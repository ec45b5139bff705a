"""What stays outside of compiled layers: code that asks the device how much there is to do.

A loop over the experts that some token chose is another program for each micro-batch. A module whose own forward has
one is left to the interpreter, and the layer around it is compiled in two pieces. A module that hands such counts on,
as numbers of Python's, would have all after it compiled again for each of them: its model is not compiled.

What is compiled in parts cannot be computed again as one program: the parts are, each by itself.
"""

from __future__ import annotations

import torch
from torch import nn

from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM

_ASKS = frozenset({"nonzero", "item"})
_HANDS_ON = "tolist"


def handing_on_counts(model: nn.Module) -> str | None:
    """The class of a module whose forward makes Python's numbers of what the device computed; None: there is none."""
    return next((type(each).__name__ for each in model.modules() if _HANDS_ON in _names(each)), None)


def is_in_parts(root: CausalLM) -> bool:
    """Whether layers of a model are compiled in parts, with something that stays outside between them."""
    recurrent = root.mixers is not None and bool(root.mixers.names)
    return recurrent or any(_asks(module) for block in decoder_blocks(root.model) for module in block.modules())


def keep_outside(block: nn.Module) -> None:
    """Leave to the interpreter, in place, what asks the device how much there is to do."""
    for module in block.modules():
        if _asks(module):
            module.forward = torch.compiler.disable(module.forward)


def _asks(module: nn.Module) -> bool:
    return not _ASKS.isdisjoint(_names(module))


def _names(module: nn.Module) -> tuple[str, ...]:
    """What the forward of its class reads; of one that dispatches to grouped products, what the dispatch reads."""
    code = getattr(type(module).forward, "__code__", None)
    return () if code is None else code.co_names
