"""What decoder layers keep from their attention: where documents lie, and how far back a token sees.

Classes tell both by a mask, which our attention goes without. Most hand on options too, and ours takes documents and
windows from these. A layer that takes options and drops them (StableLM, Nemotron) gives its attention the documents in
the mask's place; attention whose class knows its window from the mask alone (Qwen2-MoE, PhiMoE) keeps its length.
Either way the proof at the start of a training holds the result to the class's own.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from tuner.model.wrap import Wrapper, wrap

_WINDOW, _SLIDING, _MASK = "sliding_window", "sliding_attention", "create_sliding_window_causal_mask"


def tell_attention(decoder: nn.Module, config: PretrainedConfig) -> None:
    """Have the attention of a decoder's layers know documents and windows, in place."""
    windows = _windows(decoder, config.get_text_config())
    module: Any
    for module in decoder.modules():
        own = type(module).forward
        if hasattr(module, "self_attn") and _drops_options(own):
            _give_documents(module)
        if windows and hasattr(module, "layer_idx") and "ALL_ATTENTION_FUNCTIONS" in _names(own):
            window = windows[module.layer_idx % len(windows)]
            if window is not None and _WINDOW not in _names(own):
                module.tuner_window = window


def _windows(decoder: nn.Module, config: PretrainedConfig) -> list[int | None]:
    """Of each layer the tokens that it sees, this one included, as its decoder's masks have it; None: all before.

    Empty without windows.
    """
    window = getattr(config, _WINDOW, None)
    if window is None or _MASK not in _names(type(decoder).forward):
        return []
    kinds = getattr(config, "layer_types", None)
    return [window] if kinds is None else [window if kind == _SLIDING else None for kind in kinds]


def _drops_options(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes a mask and options by name, and reads none of the latter."""
    plain = inspect.unwrap(forward)
    options = inspect.getfullargspec(plain).varkw
    if options is None or "attention_mask" not in inspect.signature(plain).parameters:
        return False
    return all(step.argval != options for step in dis.get_instructions(plain.__code__))


def _give_documents(layer: nn.Module) -> None:
    own = layer.forward

    @wraps(own)
    def forward(*args: Any, documents: Any = None, **options: Any) -> Any:
        return own(*args, **(options if documents is None else {**options, "attention_mask": documents}))

    wrap(layer, Wrapper.DOCUMENTS, forward)


def _names(forward: Callable[..., Any]) -> set[object]:
    """What a forward reads, and the names of options that it gives."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return set()
    given = [name for each in code.co_consts if isinstance(each, tuple) for name in each]
    return {*code.co_names, *given}
