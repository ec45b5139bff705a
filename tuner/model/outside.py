"""What stays outside of compiled layers: code that asks the device how much there is to do, or changes a weight.

A loop over the experts that some token chose is another program for each micro-batch. A module whose own forward has
one is left to the interpreter, and the layer around it is compiled in two pieces. A module that hands such counts on,
as numbers of Python's, would have all after it compiled again for each of them: its model is not compiled.

What is compiled in parts cannot be computed again as one program: the parts are, each by itself.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.model.wrap import Wrapper, wrap

_ASKS = frozenset({"nonzero", "item"})
_HANDS_ON = "tolist"
_CHANGES = "clamp_"
"""What Gemma 3n's layers do to a weight of theirs in each forward: for a program a change of what it is given."""


def handing_on_counts(model: nn.Module) -> str | None:
    """The class of a module whose forward makes Python's numbers of what the device computed; None: there is none."""
    return next((type(one).__name__ for one in model.modules() if _HANDS_ON in _names(type(one).forward)), None)


def is_in_parts(root: CausalLM) -> bool:
    """Whether layers of a model are compiled in parts, with something that stays outside between them."""
    recurrent = root.layout.mixers is not None and bool(root.layout.mixers.names)
    modules = [module for block in decoder_blocks(root.model) for module in block.modules()]
    return recurrent or any(next(_left_out(module), None) for module in modules)


def keep_outside(block: nn.Module) -> None:
    """Leave to the interpreter, in place, what asks the device how much there is to do, or changes a weight."""
    for module in block.modules():
        for name in list(_left_out(module)):
            outside = torch.compiler.disable(getattr(module, name))
            wrap(module, Wrapper.UNCOMPILED, outside) if name == "forward" else setattr(module, name, outside)


def _left_out(module: nn.Module) -> Iterator[str]:
    """The methods of a module that stay outside."""
    if not _ASKS.isdisjoint(_names(type(module).forward)):
        yield "forward"
    yield from (name for name, method in vars(type(module)).items() if _CHANGES in _names(method))


def _names(method: Any) -> tuple[str, ...]:
    """What a method reads; of one that dispatches to grouped products, what the dispatch reads."""
    code = getattr(method, "__code__", None)
    return () if code is None else code.co_names
