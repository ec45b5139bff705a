"""Faults that are planted into a training of the campaign of causal types, each of which it must find.

They come after the model was built and checked as every run checks its own, so that nothing but figures can show them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tuner.model import attention
from tuner.model.root import CausalLM

EXPERT = "expert"
"""In the export, not in the training."""


def planted(name: str, root: CausalLM) -> AbstractContextManager[None]:
    """Within, the model computes with the fault of that name; without a name, and with that of the export, as it is."""
    return FAULTS[name](root) if name in FAULTS else nullcontext()


@contextmanager
def _missing_reset(root: CausalLM) -> Iterator[None]:
    """The documents of a row are one document; their positions stay as they are."""
    forward = root.forward

    def whole(ids: torch.Tensor, positions: torch.Tensor, lengths: tuple[int, ...], *rest: Any, **named: Any) -> Any:
        return forward(ids, positions, (sum(lengths),), *rest, **named)

    root.forward = whole  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del root.forward


@contextmanager
def _router_in_bf16(root: CausalLM) -> Iterator[None]:
    """The products of routers are rounded, as autocast would round them."""
    found = [module for name, module in root.model.named_modules() if _is_router(name, module)]
    if not found:
        raise ValueError(f"{type(root.model).__name__} has no router")
    kept = [module.forward for module in found]
    for module in found:
        module.forward = _rounding(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, forward in zip(found, kept, strict=True):
            module.forward = forward  # type: ignore[method-assign]


def _is_router(name: str, module: nn.Module) -> bool:
    has_weight = any(True for _ in module.parameters(recurse=False))
    return has_weight and name.rpartition(".")[2] in ("gate", "router")


def _rounding(forward: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            made = forward(*given, **named)
        if isinstance(made, tuple):
            return tuple(one.float() if one.dtype == torch.bfloat16 else one for one in made)
        return made.float()

    return rounded


@contextmanager
def _missing_state_reset(root: CausalLM) -> Iterator[None]:
    """Layers with a state of their own take the documents of a row for one; attention keeps them apart."""
    if root.layout.mixers is None:
        raise ValueError(f"{type(root.model).__name__} has no layers with a state")
    expect = root.layout.mixers.expect
    root.layout.mixers.expect = lambda lengths, device: expect((), device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del root.layout.mixers.expect


@contextmanager
def _wrong_sink(root: CausalLM) -> Iterator[None]:
    """Attention takes sinks a tenth larger than the model's."""
    own = attention._sinks
    seen = []

    def larger(options: dict[str, Any]) -> torch.Tensor | None:
        sink = own(options)
        seen.append(sink is not None)
        return None if sink is None else sink * 1.1

    attention._sinks = larger
    try:
        yield
    finally:
        attention._sinks = own
    if not any(seen):
        raise ValueError(f"{type(root.model).__name__} has no sinks")


@contextmanager
def _no_router_loss(root: CausalLM) -> Iterator[None]:
    """The term that keeps experts evenly busy is left out."""
    if root.parts.router_loss is None:
        raise ValueError(f"{type(root.model).__name__} has no loss of its routers")
    kept, root.parts = root.parts, replace(root.parts, router_loss=None)
    try:
        yield
    finally:
        root.parts = kept


FAULTS: Mapping[str, Callable[[CausalLM], AbstractContextManager[None]]] = {
    "reset": _missing_reset, "state": _missing_state_reset, "sink": _wrong_sink, "balance": _no_router_loss,
    "router": _router_in_bf16,
}


def swap_experts(directory: Path) -> None:
    """Let the first two experts of every layer of an export be each other's. Raises ValueError where there are none."""
    swapped = 0
    for path in sorted(directory.glob("*.safetensors")):
        tensors, changed = load_file(path), {}
        for name, tensor in tensors.items():
            if (number := re.search(r"experts\.([01])\.", name)) is not None:
                other = f"experts.{1 - int(number[1])}."
                changed[name] = tensors[name.replace(number[0], other)].clone()
            elif "experts" in name and "shared" not in name and tensor.ndim == 3:
                changed[name] = tensor[[1, 0, *range(2, len(tensor))]].clone()
        swapped += len(changed)
        save_file(tensors | changed, path, metadata={"format": "pt"})
    if not swapped:
        raise ValueError(f"{directory} has no experts")
