"""The header of a safetensors file, from names, types and shapes alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tuner.checkpoint.index import DTYPE_NAMES


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """The length-prefixed header of a file that holds these tensors without gaps, padded to 8 bytes.

    Beside it each tensor's byte span after the header. Given wide types first, every tensor starts at a multiple of its
    item size.
    """
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        spans.append((start, end))
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans
