"""Memory of the host that holds what a device has no room for: who counts it, and how CUDA copies from and into it on
its own time, page-locked as it lies, where the system allows that.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch

from tuner.runtime.device import forget_cuda_error
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


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


def page_lock(block: torch.Tensor, device: torch.device) -> int:
    """Page-lock a block of host memory where it lies: torch's own allocator of such memory rounds up to powers of two.

    Returns CUDA's error code, 0 where the block is locked; where the system refuses so much (WSL, small containers) a
    copy is right too, but whoever asks for it waits. The calling thread must have made ``device`` its own: the call
    makes a context on whatever device is the thread's.
    """
    if code := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE)):
        forget_cuda_error(device)
    return code


def page_unlock(block: torch.Tensor) -> None:
    """Give back the lock of a block that was page-locked."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
