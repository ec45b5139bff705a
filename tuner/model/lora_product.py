"""An adapter's product added to its layer's in one operation, in place of peft's three passes over the result.

peft computes ``W·x + (B·(A·x))·s``: the second product is written, scaled and added, each a pass over ``[tokens,
outputs]``, and its gradient is scaled in a further one. Here the sum is made inside the matrix product
(``addmm``), which scales its float32 accumulator: the same numbers but for two roundings that it leaves out.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn


def takes_product(layer: Any, adapter: str) -> bool:
    """Whether an adapted layer of peft's is a plain linear one, with LoRA that has no variant and no bias."""
    up = layer.lora_B[adapter]
    linear = isinstance(layer.get_base_layer(), nn.Linear) and isinstance(up, nn.Linear)
    return linear and up.bias is None and adapter not in layer.lora_variant


def add_in_product(layer: Any) -> None:
    """Have such a layer add the product of its adapter as this module says, in place.

    Dropout is drawn as peft draws it, and the layer's switches (merged, disabled) stay in force.
    """
    layer.forward = MethodType(_forward, layer)  # bound: a copy of the layer computes with its own parts


def _forward(layer: Any, source: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    (adapter,) = layer.active_adapters
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    one_type = torch.is_autocast_enabled(source.device.type) or up.weight.dtype == layer.get_base_layer().weight.dtype
    if layer.merged or layer.disable_adapters or args or options or not one_type:
        plain: torch.Tensor = type(layer).forward(layer, source, *args, **options)
        return plain
    result = layer.base_layer(source)
    inner = down(layer.lora_dropout[adapter](layer._cast_input_dtype(source, down.weight.dtype)))
    summed = torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), up.weight.T, alpha=layer.scaling[adapter])
    return summed.view(result.shape).to(result.dtype)
