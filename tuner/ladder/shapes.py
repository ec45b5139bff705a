"""The shape of a model with so many parameters, in the proportions of a given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import RecipeError

WEIGHT = 5.0
"""Of a count that is off by a share, against proportions that are off by a logarithm: 20 % are as bad as a factor e.

A fit reads what a size really counts; one that is much deeper or shallower than the others is off their curve.
"""
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
EIGHTH = 8
"""Widths of the MLP are multiples of so many, which products are fast with."""


@dataclass(frozen=True)
class Proportions:
    """What stays as it is when a model grows: width of a head, heads that share keys, MLP and depth to width."""

    hidden_per_head: int
    heads_per_group: int
    names_groups: bool
    """Whether the config has a key for the heads of keys and values."""
    mlp_ratio: float
    aspect: float
    """Hidden size for each layer."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> Proportions:
        """Those of a model's config. Raises RecipeError for one that does not name its shape."""
        missing = [key for key in NEEDED if not isinstance(config.get(key), int)]
        if missing:
            raise RecipeError(
                f"ladder.sizes: the config of {config.get('model_type')} names no {missing[0]} to scale",
                hint="write sizes as configs: {name: small, config: {...}}",
            )
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        groups = config.get("num_key_value_heads")
        return Proportions(
            hidden // heads,
            heads // (groups or heads),
            groups is not None,
            config["intermediate_size"] / hidden,
            hidden / config["num_hidden_layers"],
        )

    def shape(self, heads: int, layers: int) -> dict[str, int]:
        """Keys of the config for so many heads and layers."""
        hidden = heads * self.hidden_per_head
        return {
            "hidden_size": hidden,
            "intermediate_size": max(1, round(hidden * self.mlp_ratio / EIGHTH)) * EIGHTH,
            "num_attention_heads": heads,
            **({"num_key_value_heads": heads // self.heads_per_group} if self.names_groups else {}),
            "num_hidden_layers": layers,
        }


def shape_of(parameters: int, config: Mapping[str, Any], count: Callable[[dict[str, int]], int]) -> dict[str, int]:
    """Keys of the config of a model with so many parameters without embeddings, as `count` counts those of a shape.

    It is near both to the count and to the proportions of `config`, of which depth to width gives way. Raises
    RecipeError.
    """
    keep = Proportions.of(config)
    return min(_candidates(parameters, keep, count), key=lambda found: found[0])[1]


def _candidates(
    parameters: int, keep: Proportions, count: Callable[[dict[str, int]], int]
) -> Iterator[tuple[float, dict[str, int]]]:
    """Shapes of several widths, each with how far it is off.

    Counts grow linearly with layers, so that two of a width give all of it.
    """
    group = keep.heads_per_group
    one = count(keep.shape(group, 1))
    per_square = max(1.0, (count(keep.shape(group, 2)) - one) / (group * keep.hidden_per_head) ** 2)
    width = (parameters * keep.aspect / per_square) ** (1 / 3)
    middle = max(1, round(width / (group * keep.hidden_per_head)))
    for groups in range(max(1, middle // 2), middle * 2 + 2):
        heads = groups * group
        first = count(keep.shape(heads, 1))
        layer = count(keep.shape(heads, 2)) - first
        layers = max(1, round((parameters - first) / layer) + 1)
        off = abs(first + (layers - 1) * layer - parameters) / parameters
        aspect = heads * keep.hidden_per_head / layers
        yield WEIGHT * off + abs(math.log(aspect / keep.aspect)), keep.shape(heads, layers)
