"""Weights that are the same numbers wherever they are drawn, and what bitsandbytes 0.50.2 made of them on a CPU."""

import hashlib

import numpy as np
import torch

BLOCKS = 1000
MADE_BY_BITSANDBYTES = {
    "torch.bfloat16": "ed50bc8cba6a69cc2573e7cd28bc6e1d913985b0f0dcb68c7ba87392a715c23c",
    "torch.float16": "c7e7ce614f8af150336afd3fc5590365d8fa946e4ce82c65196795da3a3904f5",
    "torch.float32": "7ff4bcc6b740b7db472f3f585dddd0701e31cced689f8330cbdadc71d8ac1f7a",
}
"""SHA-256 of what `tools/quantize_campaign.py blocks` computes with the package for :func:`blocks`: by the weight's
type, of codes, scales, and the dequantised values in float32, bfloat16 and float16, one after the other."""


def blocks(dtype: torch.dtype, count: int = BLOCKS, columns: int = 64) -> torch.Tensor:
    """Weights ``[count, columns]``, few of them large, of rows that differ by a factor of up to 2^16."""
    drawn = hashlib.shake_256(b"blocks of weights").digest(2 * count * columns)
    parts = np.frombuffer(drawn, "<i2").astype(np.float32).reshape(count, columns) / 32768
    sizes = np.float32(2.0) ** -(np.arange(count, dtype=np.float32) % 17)
    return torch.from_numpy(parts * parts * parts * sizes[:, None]).to(dtype)


def sha256(*tensors: torch.Tensor) -> str:
    """Of the bytes of tensors, one after the other."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
