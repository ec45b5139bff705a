"""Attention that counts tokens: in packed rows from the start of each document, as the model does from that of its row.

Llama 4 attends inside chunks of so many tokens in some layers and raises the temperature of the others every so many
tokens; Inkling raises it with the logarithm of their number, and adds a bias by distance to scores, which it makes for
all pairs of tokens. They number the tokens of a forward themselves. Here
the layers are kept from it, and :func:`~tuner.model.attention.packed_attention` does the same by the numbers that
tokens have in their documents. Imported for such models alone.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from tuner.model.attention import ByDistance
from tuner.model.wrap import Wrapper, unwrap, wrap

_CHUNKED = "chunked_attention"
"""A layer's type in the config."""
_READ = "log_scaling_n_floor"
"""What Inkling's layers ask the config for before they count."""


@dataclass(frozen=True)
class InSteps:
    """Llama 4's factors of queries: greater by the logarithm of the steps that a token is from the start."""

    step: float
    strength: float

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """float32 factors of tokens with these ``numbers``, from 0 on."""
        return torch.log1p(torch.floor((numbers.float() + 1.0) / self.step)) * self.strength + 1.0


@dataclass(frozen=True)
class ByLogarithm:
    """Inkling's factors of queries and of the position bias: greater by the logarithm of a token's number."""

    step: float
    strength: float

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        """float32 factors of tokens with these ``numbers``, from 0 on."""
        return 1.0 + self.strength * torch.log(((numbers + 1).float() / self.step).clamp(min=1.0))


class _Without:
    """A config as a layer sees it, in which some values are None; ``whole`` is the config itself."""

    def __init__(self, config: PretrainedConfig, *names: str) -> None:
        self.whole, self._names = config, names

    def __getattr__(self, name: str) -> Any:
        if name in {"whole", "_names"}:  # while a copy is being made
            raise AttributeError(name)
        return None if name in self._names else getattr(self.whole, name)


def count_by_document(decoder: nn.Module, config: PretrainedConfig) -> int:
    """Have the layers of a decoder count inside documents, in place; the tokens of a chunk, 0 without any."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    chunk = int(getattr(text, "attention_chunk_size", None) or 0) if _CHUNKED in kinds else 0
    module: Any
    for module in decoder.modules():
        if not callable(getattr(module, "forward", None)) or not hasattr(module, "layer_idx"):
            continue
        if chunk and kinds[module.layer_idx] == _CHUNKED:
            module.tuner_chunk = chunk
        _take_steps(module)
        _take_logarithm(module)
        _take_bias(module)
    return chunk


def count_by_class(decoder: nn.Module) -> None:
    """Have the layers count as their class does again, for attention that is the class's own."""
    module: Any
    for module in decoder.modules():
        marked = vars(module)
        marked.pop("tuner_chunk", None)
        if isinstance(marked.pop("tuner_temperature", None), InSteps):
            module.attn_temperature_tuning = True
        if isinstance(marked.get("config"), _Without):
            module.config = module.config.whole
        if getattr(marked.get("forward"), "__func__", None) is _by_distance:
            unwrap(module)


def _take_steps(module: Any) -> None:
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        module.attn_temperature_tuning = False
        module.tuner_temperature = InSteps(module.floor_scale, module.attn_scale)


def _take_logarithm(module: Any) -> None:
    if _READ not in _names(module) or "position_ids" in _names(module):  # Inkling 2 takes the numbers it is given
        return
    config = module.config
    if config.log_scaling_n_floor is not None and not module.is_sliding:
        module.tuner_temperature = ByLogarithm(config.log_scaling_n_floor, config.log_scaling_alpha)
    module.config = _Without(config, _READ)


def _names(module: nn.Module) -> set[object]:
    """What the forward of a layer reads: names of attributes, and keys."""
    code = getattr(type(module).forward, "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_consts}


def _take_bias(module: Any) -> None:
    relative = getattr(module, "rel_logits_proj", None)
    if relative is not None and relative.proj.shape[1] == relative.rel_extent:
        # As a method, not a partial: compiled, each of these would be a program of its own.
        wrap(relative, Wrapper.DOCUMENTS, MethodType(_by_distance, relative))


def _by_distance(relative: Any, states: torch.Tensor, *positions: torch.Tensor) -> ByDistance:
    """Of Inkling's states ``[1, T, heads, d]`` the bias by distance, before it is spread over all pairs of a row."""
    return ByDistance((states @ relative.proj).transpose(1, 2))
