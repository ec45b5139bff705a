"""The model as transformers loads it, over the tensors of the model that is trained: no second copy of a weight."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from tuner.model.transformers_private import forget_attention, from_config, takes_attention


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the config in which each class chooses its attention, as for someone who only loads the model."""
    plain = copy.deepcopy(config)
    forget_attention(plain)
    return plain


def takes_our_attention(config: PretrainedConfig) -> bool:
    """Whether the class behind a config computes attention through transformers' interface.

    The others have attention of their own, and keep it: what the config names as implementation never reaches their
    layers, but it decides whether they are given a causal mask.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return all(each is None or takes_attention(each) for each in kinds)


@torch.no_grad()
def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A new model of the same class and config, with its class's own attention and masks, in evaluation mode.

    Parameters and buffers are those of ``model``, not copies. Modules that training put there (adapters, rows of new
    tokens) are copied around the same tensors. Kernels that were swapped in are not: they are held to the originals.
    """
    with torch.device("meta"):
        twin = from_config(model, plain_config(model.config), dtype=model.dtype)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    _share(twin, model, {**shared, id(model.config): twin.config})
    twin.config.use_cache = False
    twin.eval()
    return twin


def _share(into: nn.Module, of: nn.Module, memo: dict[int, Any]) -> None:
    into._parameters.update(of._parameters)
    into._buffers.update(of._buffers)
    # Tensors that are neither are made in the constructor from the config alone, where nothing has storage.
    vars(into).update({key: value for key, value in vars(of).items() if isinstance(value, torch.Tensor)})
    for name, child in of.named_children():
        if type(into._modules.get(name)) is type(child):
            _share(into.get_submodule(name), child, memo)
        else:
            into._modules[name] = copy.deepcopy(child, memo)
