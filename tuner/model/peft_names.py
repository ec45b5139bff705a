"""Linear layers whose names peft takes for those of routed experts, and how they are adapted all the same.

transformers 4 had a layer for each weight of each expert; transformers 5 has one tensor for the weights of all. So that
adapters of then can be loaded, peft reads ``gate_proj`` in such a mixture as that tensor, wherever a layer of this name
lies: it passes over dense layers and shared experts, and adapts the routed experts, when an adapter is made and when it
is loaded. Whether it does depends on a layer's last name and the model's type alone.
"""

from collections.abc import Iterable
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel


def taken_for_experts(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of the layers by ``names`` in whose place peft would adapt the routed experts of a model like this."""
    taken: dict[str, bool] = {}
    found = []
    for name in names:
        last = name.rpartition(".")[2]
        if last not in taken:
            taken[last] = _is_taken(model, last)
        if taken[last]:
            found.append(name)
    return found


def _is_taken(model: PreTrainedModel, last: str) -> bool:
    config: Any = LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it wants the experts' other weight named as well, which lies in the same tensor
        return True
    return last not in config.target_modules


def inject_as_named(config: LoraConfig, model: PreTrainedModel, adapter: str, on_meta: bool) -> None:
    """Have peft adapt the very layers that its config names, in place: it gets the model's parts without their type."""
    parts: Any = nn.Module()
    for name, child in model.named_children():
        parts.add_module(name, child)
    inject_adapter_in_model(config, parts, adapter, low_cpu_mem_usage=on_meta)
    for name, child in parts.named_children():
        setattr(model, name, child)
    model.peft_config = parts.peft_config  # as it notes it on a whole model
