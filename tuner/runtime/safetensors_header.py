"""The header of a safetensors file: written, and read within bounds before a library opens what may be another."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.errors import DataError
from tuner.runtime.files import reading

_LIMIT, _ALWAYS, _SHARE = 1 << 24, 1 << 20, 16
"""Bytes: of 100,000 tensors it has eleven million. One above the second takes no more than such a share of its file."""
_SIGNS, _MOST_SIGNS = (b",", b":", b"[", b"{"), 3
"""What makes an object of a header: one of so many bytes, or it is made to take memory."""


TYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""Every type that can be saved, by its safetensors name: what torch calls it, and bytes."""


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """The length-prefixed header of a file of these names, types and shapes without gaps, padded to 8 bytes.

    With it each tensor's byte span after the header. Given wide types first, every tensor starts at a multiple of its
    item size.
    """
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, dtype_name, shape in tensors:
        start, end = end, end + math.prod(shape) * TYPES[dtype_name][1]
        fields[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, end]}
        spans.append((start, end))
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a file by name, as its header describes them, and the byte at which they begin. DataError."""
    try:
        with reading(path), path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if length > min(_LIMIT, _ALWAYS + size // _SHARE) or 8 + length > size:
                raise DataError(f"{path}: not a safetensors file")
            text = file.read(length)
        if not text.startswith(b"{") or sum(map(text.count, _SIGNS)) * _MOST_SIGNS > length:
            raise DataError(f"{path}: not a safetensors file")
        header: Any = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its header cannot be read: {error}") from error
    return {name: facts for name, facts in header.items() if name != "__metadata__"}, 8 + length


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these keys. Raises ValueError for one that is there twice: readers would take either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found
