"""What `train` builds, on fake tensors: shapes and types as in training, on any device, in no memory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


def give_storage(root: nn.Module, device: torch.device) -> None:
    """Put tensors on ``device`` in the place of those on the meta device; tied ones stay one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            fresh = torch.empty_like(tensor, device=device)
            made[tensor] = (
                nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
            )
        return made[tensor]

    for module in root.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = like(tensor)  # type: ignore[assignment]  # a parameter for a parameter


class _Quiet:
    """The compiled library, whose functions do nothing; those that say how much scratch space they take still do."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name) if name.endswith("_scratch") else _Nothing()


class _Nothing:
    """A function of the library that finds nothing wrong."""

    def __call__(self, *args: Any) -> int:
        return 0


@contextmanager
def quiet_kernels() -> Iterator[None]:
    """Within, the kernels that are compiled for this processor do not run: fakes have no memory to work on."""
    users = [module for name, module in sys.modules.items() if name.startswith("tuner.model.native.")]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for module in users:
            if callable(plain := getattr(module, "library", None)):
                stack.enter_context(patch.object(module, "library", lambda plain=plain: _Quiet(plain())))
        yield
