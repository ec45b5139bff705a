"""The norm of many gradients, as exact whether a process holds all of a tensor or a shard of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tuner.runtime.torch_private import each_norm

_CHUNK = 4096


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of all elements' squares of one or more tensors, a float64 scalar on their device.

    torch's norm on a CPU adds a whole tensor up in a few float32 lanes: 1.5e-3 off for an embedding of 28 million
    elements, and less for each half of it. Here chunks of a few thousand elements are added in float32 and the chunks
    in float64, in less time. On CUDA one fused launch for all tensors already adds in chunks, as a tree.
    """
    if tensors[0].is_cuda:
        return torch.stack(list(each_norm(tensors))).double().square().sum()
    norms = [norm for tensor in tensors for norm in _chunk_norms(tensor.reshape(-1))]
    return torch.cat(norms).double().square().sum()


def _chunk_norms(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of a vector's whole chunks, and of what is left at its end."""
    whole = flat.numel() // _CHUNK * _CHUNK
    chunks = torch.linalg.vector_norm(flat[:whole].view(whole // _CHUNK, _CHUNK), dim=1)
    return chunks, torch.linalg.vector_norm(flat[whole:]).reshape(1)
