"""Memory of the host that holds what a device has no room for, and who counts it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch

from tuner.runtime.members import member

HostPart = Literal["optimizer", "activations", "gradients", "parameters", "staging"]
"""What bytes of the host are for, in the words of a prediction."""
_observers: list[Callable[[torch.Tensor, HostPart], None]] = []


def host_empty(shape: Sequence[int], dtype: torch.dtype, part: HostPart, near: torch.device) -> torch.Tensor:
    """An empty tensor of this shape in the host's memory, for a part of what is kept for the device ``near``.

    For a CUDA device it is page-locked, so that copies run while it computes. Raises RuntimeError as torch does
    where the host has no such memory left.
    """
    found = torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=near.type == "cuda")
    entered(found, part)
    return found


def entered(tensor: torch.Tensor, part: HostPart) -> None:
    """Say that a tensor is kept in the host's memory, whatever it was allocated by."""
    for observer in _observers:
        observer(tensor, part)


def observed(observer: Callable[[torch.Tensor, HostPart], None]) -> AbstractContextManager[None]:
    """Have ``observer`` called with each tensor that is kept on the host, and what for, for the length of the block."""
    return member(_observers, observer)
