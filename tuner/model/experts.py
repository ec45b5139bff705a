"""The routed experts of a mixture, as transformers has them: one module for all experts of a layer."""

import inspect

from torch import nn

_SAID = ("has_gate", "has_bias", "is_transposed", "num_experts")
"""What transformers notes on a module that follows its interface of experts (`use_experts_implementation`)."""


def routed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the routed experts of a layer, by name, where they follow transformers' interface.

    Their weights are ``[E, ...]``, and they compute tokens ``[T, D]`` of which each has chosen ``[T, K]`` experts.
    """
    said = ((name, one) for name, one in model.named_modules() if all(hasattr(one, word) for word in _SAID))
    return {name: module for name, module in said if _takes_choices(module)}


def _takes_choices(module: nn.Module) -> bool:
    """Whether a module's forward takes hidden states, choices and their weights, by whichever names."""
    given = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(given) == 3 and given[0] == "hidden_states"
