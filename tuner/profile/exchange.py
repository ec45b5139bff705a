"""What processes that compute together must send each other in a step, from a model's config; nothing is traced."""

from __future__ import annotations

from math import gcd

from transformers import PretrainedConfig

from tuner.config.recipe import Recipe
from tuner.model.flops import experts_of_token
from tuner.profile.estimate import Place
from tuner.profile.traffic import Traffic
from tuner.setup.settled import data_processes

PASSES = 2
"""Forward and backward, each of which sends as much."""
BLOCKS = 2
"""Of a layer: attention and MLP."""
PIECES = 2
"""A sum is made of parts that are sent once, and sent once more when they are whole: a ring's all-reduce."""


def least_exchanged(recipe: Recipe, config: PretrainedConfig, place: Place) -> Traffic:
    """Bytes that one process sends in a step of mean rows, at least: of the layers alone, none of them recomputed.

    With ``tensor``, the sum of what each block gives (Shoeybi et al. 2019, section 3); with ``sequence``, queries,
    keys, values and outputs of each attention (Jacobs et al. 2023, section 3.2); with ``expert``, each token to its
    experts and back.
    """
    text, parallel = config.get_text_config(), recipe.parallel
    layers, width = int(getattr(text, "num_hidden_layers", 0)), int(getattr(text, "hidden_size", 0))
    rows = recipe.train.global_batch_size / data_processes(recipe, place.rank_info.world_size)
    tokens = rows * place.work.tokens_per_row / parallel.sequence
    numbers = PIECES * BLOCKS * width * _others(parallel.tensor)
    numbers += _of_attention(text, parallel.sequence) * _others(parallel.sequence) / parallel.tensor
    numbers += 2 * experts_of_token(text) * width * _others(parallel.expert)
    sent = round(numbers * tokens * layers * PASSES * _number_bytes(recipe))
    group = parallel.tensor * max(parallel.sequence, parallel.expert)
    return Traffic(exchanged=sent, exchanged_far=sent * (group > place.rank_info.local_world_size))


def _others(size: int) -> float:
    """The share of what a process has that is for the others of its group."""
    return (size - 1) / size


def _of_attention(config: PretrainedConfig, size: int) -> int:
    """Numbers of a token that change places around attention: its queries and outputs, keys and values.

    Key heads that do not divide over the processes are repeated until they do.
    """
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    channels = getattr(config, "head_dim", None) or (int(getattr(config, "hidden_size", 0)) // heads if heads else 0)
    return 2 * (heads + key_heads * (size // gcd(key_heads, size))) * int(channels)


def _number_bytes(recipe: Recipe) -> int:
    """Bytes of a number that layers give each other."""
    return 4 if recipe.train.precision == "fp32" else 2
