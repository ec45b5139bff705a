"""The routed experts of a mixture, as transformers has them: one module for all experts of a layer."""

import inspect

from torch import nn

LORA_A, LORA_B = "_lora_A", "_lora_B"
"""Ends of the names of an adapter's parameters next to the weight of all experts that they adapt."""
NO_EXPERTS = "write experts: false"
"""What helps where routed experts cannot have an adapter."""
_SAID = ("has_gate", "has_bias", "is_transposed", "num_experts")
"""What transformers notes on a module that follows its interface of experts (`use_experts_implementation`)."""


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the routed experts of a layer, by name, where they follow transformers' interface.

    Their weights are ``[E, ...]``, and they compute tokens ``[T, D]`` of which each has chosen ``[T, K]`` experts.
    """
    said = ((name, one) for name, one in model.named_modules() if all(hasattr(one, word) for word in _SAID))
    given = ((name, one, [*inspect.signature(type(one).forward).parameters][1:]) for name, one in said)
    return {name: one for name, one, taken in given if len(taken) == 3 and taken[0] == "hidden_states"}


def adapted_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of routed experts that have an adapter, by name."""

    return {name: module for name, module in model.named_modules() if adapted_weights(module)}


def adapted_weights(module: nn.Module) -> list[str]:
    """Names of the weights of such a module that have an adapter, in the order of its parameters."""
    own = dict(module.named_parameters(recurse=False))
    return [name for name in own if f"{name}{LORA_A}" in own]
