"""Whether the decoder layers of a model are alike, and the config of one with fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks


def layers_alike(model: PreTrainedModel) -> int:
    """The number of a model's decoder layers where all are alike; 0 where they are not, or cannot be found."""
    try:
        blocks = decoder_blocks(model)
    except RecipeError:
        return 0
    shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in block.state_dict().items()] for block in blocks]
    count, config = len(blocks), model.config.get_text_config()
    if config.num_hidden_layers != count or any(other != shapes[0] for other in shapes):
        return 0
    return count if all(len(set(map(str, values))) == 1 for _, values in _by_layer(config)) else 0


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The config of a model with fewer layers, which are like the first ones of this."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    for name, values in list(_by_layer(text)):
        setattr(text, name, list(values[:count]))
    text.num_hidden_layers = count
    return shorter


def _by_layer(config: PretrainedConfig) -> Iterator[tuple[str, Sequence[Any]]]:
    """What a config lists for each layer."""
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            yield name, value
