"""Linear layers with an adapter: which can have one, by what a model's code does with them, and how it is added.

An adapter changes what a layer gives when it is called. Code that reads the weight itself never meets it: kernels of
Mamba are given weights, Jamba multiplies by one, Gemma 3n bounds one. A weight that several layers share would get an
adapter from each, which no merged weight can hold.

peft computes ``W·x + (B·(A·x))·s``: the second product is written, scaled and added, each a pass over ``[tokens,
outputs]``, and its gradient is scaled in a further one. Here the sum is made inside the matrix product
(``addmm``), which scales its float32 accumulator: the same numbers but for two roundings that it leaves out.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from torch import nn

from tuner.model.wrap import Wrapper, wrap
from tuner.runtime.device import target

_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|ndim|size|data)\b|\[|\s*=[^=])")
"""A weight that code computes with. What it asks about one, or changes in place, is no such reading; nor is a slice,
which Bloom takes under one setting of its config: what runs is seen by what it computes."""
QUANTIZED = "QuantizedLinear"
"""The class of layers with codes and scales in the place of a weight, which few trainings load."""
READ = "its weight is read without a call: an adapter learns nothing"
SWITCH = "tuner_switch"
"""The attribute of an adapted layer that holds a number ``[]``, 1 or 0, where a compiled program reads whether the
adapter is on."""
TOGETHER = "tuner_together"
"""The attribute of an adapted layer that holds those it is computed with on a GPU, and its place among them."""
SHARED = "blocks share its weight, and their adapters cannot be merged"


def is_linear(module: nn.Module) -> bool:
    """Whether a layer computes what `nn.Linear` does, or GPT-2's `Conv1D`, and nothing else.

    Models' classes that are made from `nn.Linear` are tried on small weights: Falcon's layer is one, a router that
    chooses experts is none. Those of torch are parts of layers that read their weight.
    """
    kind = type(module)
    if kind.__name__ in ("Linear", "Conv1D", QUANTIZED):
        return True
    return isinstance(module, nn.Linear) and not kind.__module__.startswith("torch.") and _computes_linear(module)


@torch.no_grad()
def _computes_linear(module: nn.Linear) -> bool:
    weight, x = torch.tensor([[0.5, -2.0], [3.0, 1.5], [-1.0, 0.25]]), torch.tensor([[1.5, -0.75], [2.0, 4.0]])
    small = {"weight": weight} | ({} if module.bias is None else {"bias": torch.tensor([0.5, -1.0, 2.0])})
    try:
        found = torch.func.functional_call(module, small, (x,))
    except Exception:  # noqa: BLE001 - whatever a class's own forward raises, it is not nn.Linear's
        return False
    wanted = nn.functional.linear(x, weight, small.get("bias"))
    return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.equal(found, wanted)


def held_tensor(layer: nn.Module) -> torch.Tensor:
    """The parameter in which a linear layer's weight lies: of a quantised layer, its scales."""
    return layer.scales if type(layer).__name__ == QUANTIZED else layer.weight  # type: ignore[return-value]


def weight_type(layer: nn.Module) -> torch.dtype:
    """The type of a linear layer's weight; none is made to know it."""
    return layer.dtype if type(layer).__name__ == QUANTIZED else layer.weight.dtype  # type: ignore[return-value]


def not_adaptable(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Of linear ``layers`` of a model, by name, those that cannot be adapted, each with the reason."""
    linear = (each for each in model.modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D")
    weights = Counter(id(held_tensor(each)) for each in linear)
    holders = {name: type(model.get_submodule(name.rpartition(".")[0])) for name in layers}
    read = {kind: _read_by(kind) for kind in set(holders.values())}
    found = {}
    for name, layer in layers.items():
        if name.rpartition(".")[2] in read[holders[name]]:
            found[name] = READ
        elif weights[id(held_tensor(layer))] > 1:
            found[name] = SHARED
    return found


def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the layers whose weight the methods of a class of a model read, in whatever case they do."""
    found: set[str] = set()
    for base in (each for each in kind.__mro__ if not each.__module__.startswith("torch.")):
        for method in filter(inspect.isfunction, vars(base).values()):
            with suppress(OSError, TypeError):  # made at run time, or installed without its source
                found.update(_READ.findall(inspect.getsource(inspect.unwrap(method))))
    return frozenset(found)


def takes_product(layer: Any, adapter: str) -> bool:
    """Whether an adapted layer of peft's is a plain linear one, with LoRA that has no variant and no bias."""
    up = layer.lora_B[adapter]
    linear = isinstance(layer.get_base_layer(), nn.Linear) and isinstance(up, nn.Linear)
    return linear and up.bias is None and adapter not in layer.lora_variant


def add_in_product(layer: Any) -> None:
    """Have such a layer add the product of its adapter as this module says, in place.

    Dropout is drawn as peft draws it, and the layer's switches (merged, disabled) stay in force.
    """
    wrap(layer, Wrapper.ADAPTED, MethodType(added_in_product, layer))  # bound: a copy computes with its own parts


def added_in_product(
    layer: Any, source: torch.Tensor, *args: Any,
    second: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None, **options: Any,
) -> torch.Tensor:
    """The forward of such a layer, with peft's arguments; ``source`` is ``[..., in]``, what is returned ``[..., out]``.

    ``second`` gives what the adapter's second layer multiplies, of it and of what its first made: rows ``[..., r]`` and
    a weight ``[out, r]``; None: what its first made, and its own weight. On a GPU such layers are computed by
    :mod:`tuner.model.adapted_products`. On a CPU reading an input once more costs nothing that could be measured.
    """
    (adapter,) = layer.active_adapters
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    one_type = torch.is_autocast_enabled(source.device.type) or up.weight.dtype == weight_type(layer.get_base_layer())
    switch: torch.Tensor | None = getattr(layer, SWITCH, None)
    if layer.merged or layer.disable_adapters or args or options or not one_type:
        plain: torch.Tensor = type(layer).forward(layer, source, *args, **options)
        return plain if switch is None else torch.where(switch > 0, plain, layer.base_layer(source))
    together, number = getattr(layer, TOGETHER, (None, 0))
    if second is None and target(source) == "cuda" and together is not None and together.is_plain:
        found: torch.Tensor = together.result(number, source, adapter, switch)
        return found
    result = layer.base_layer(source)
    inner = down(layer.lora_dropout[adapter](layer._cast_input_dtype(source, down.weight.dtype)))
    rows, weight = (inner, up.weight) if second is None else second(up, inner)
    if switch is not None:
        rows = rows * switch
    summed = torch.addmm(result.flatten(0, -2), rows.flatten(0, -2), weight.T, alpha=layer.scaling[adapter])
    return summed.view(result.shape).to(result.dtype)
