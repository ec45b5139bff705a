"""State of zeros, for which the host gives no memory before it is written."""

from __future__ import annotations

import mmap

import torch
from torch import nn

SMALL = 1 << 16
"""Bytes below which a mapping of its own costs more than writing zeros."""


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros of a tensor's shape, device and, unless another is given, type.

    On the CPU they are a private mapping of no file, whose pages the system hands out as zeros at the first write;
    torch writes its own zeros at once, and so does calloc where the heap has freed memory. So a launch does not write,
    and the host does not hold, the moments of all weights before the first step does. Fake tensors, small ones and
    those with strides of their own have torch's.
    """
    dtype = dtype or tensor.dtype
    size = tensor.numel() * dtype.itemsize
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous() and size >= SMALL
    if not plain or tensor.device.type != "cpu":
        return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    unwritten = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(unwritten, dtype=dtype).view(tensor.shape)
