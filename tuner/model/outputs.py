"""What modules give in the forward passes of a step, seen by hooks that change nothing."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tuner.runtime import phase


@contextmanager
def outputs_seen(modules: Iterable[tuple[str, nn.Module]], see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Within, ``see`` is called with the name of each module and the first floating tensor that it gave.

    What a backward pass has computed again is left out.
    """
    part = ""

    def enter(entered: str) -> None:
        nonlocal part
        part = entered

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if part == "forward" and (tensor := first_tensor(output)) is not None:
                see(name, tensor)

        return after

    with ExitStack() as stack, phase.observed(enter):
        for name, module in modules:
            stack.enter_context(module.register_forward_hook(hook(name)))
        yield


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first floating tensor of what a module gave: itself, or the first of a tuple or mapping."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    items = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else ()
    return next((item for item in items if isinstance(item, torch.Tensor) and item.is_floating_point()), None)
