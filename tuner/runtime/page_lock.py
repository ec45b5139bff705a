"""Host memory that CUDA copies from and into on its own time: page-locked as it is, where the system allows that."""

import torch

from tuner.runtime.device import forget_cuda_error

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


def page_lock(block: torch.Tensor, device: torch.device) -> int:
    """Page-lock a block of host memory where it lies: torch's own allocator of such memory rounds up to powers of two.

    Returns CUDA's error code, 0 where the block is locked; where the system refuses so much (WSL, small containers) a
    copy is right too, but whoever asks for it waits. The calling thread must have made ``device`` its own: the call
    makes a context on whatever device is the thread's.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE))
    if code:
        forget_cuda_error(device)
    return code


def page_unlock(block: torch.Tensor) -> None:
    """Give back the lock of a block that was page-locked."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
