"""Cross-entropy on the CPU by our kernel in C (cross_entropy.c): logits become their gradient in place."""

import ctypes

import torch

from tuner.model.linear_cross_entropy import softmax_into_gradient
from tuner.model.native.library import library, threads

TYPES = (torch.bfloat16, torch.float32)
"""What the kernel takes."""


class _Call(ctypes.Structure):
    """`CrossEntropy` of cross_entropy.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "weights", "losses")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "is_bfloat", "wants_gradient", "threads")),
    )


def native_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross-entropy in nats, a float32 scalar; ``logits`` ``[N, V]`` become its gradient where that is wanted.

    Shapes: targets int64 ``[N]``, none of them ignored, and ``weights`` float32 ``[N]`` of the positions, None for
    ones. Softmax and loss are float32 whatever the logits; others than :data:`TYPES` and those of another device are
    computed by torch. Raises IndexError for a target that is no column.
    """
    if logits.is_cuda or logits.dtype not in TYPES or not logits.is_contiguous():
        return softmax_into_gradient(logits, targets, wants_gradient, weights)
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    targets, losses = targets.contiguous(), torch.empty(len(logits), dtype=torch.float32)
    call = _Call(
        logits=logits.data_ptr(),
        targets=targets.data_ptr(),
        weights=None if weights is None else weights.data_ptr(),
        losses=losses.data_ptr(),
        rows=len(logits),
        columns=logits.shape[1],
        is_bfloat=logits.dtype == torch.bfloat16,
        wants_gradient=wants_gradient,
        threads=threads(),
    )
    compute = library().cross_entropy
    compute.restype = ctypes.c_int64
    if bad := compute(ctypes.byref(call)):
        raise IndexError(f"the target at position {bad - 1} is none of {logits.shape[1]} tokens")
    return losses.sum()
