"""Where tensors lie: in one safetensors file, by its header, and in a checkpoint's files, by its index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tuner.checkpoint.manifest import INDEX_NAME
from tuner.checkpoint.shard_hash import Chunk
from tuner.errors import DataError
from tuner.runtime.files import inside, json_bytes, read_json

SCHEMA = 2

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The safetensors name of every dtype that can be saved."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: dtype, global shape, and the chunks that fill it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


Index = dict[str, TensorEntry]


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[tuple[int, int]]]:
    """The length-prefixed header of a file that holds these tensors without gaps, padded to 8 bytes.

    With it each tensor's byte span after the header. Given wide types first, every tensor starts at a multiple of its
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


def index_bytes(index: Mapping[str, TensorEntry]) -> bytes:
    """The index as JSON."""
    tensors = {
        name: {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "chunks": [vars(chunk) for chunk in entry.chunks],
        }
        for name, entry in index.items()
    }
    return json_bytes({"schema": SCHEMA, "tensors": tensors})


def read_index(directory: Path, files: Mapping[str, int]) -> Index:
    """Read and check `index.json` against `files`, name -> bytes.

    Raises DataError naming the index and the tensor when a chunk lies outside its tensor, outside its file or in a
    file that is not listed, or when the chunks do not fill the tensor.
    """
    path = directory / INDEX_NAME
    document = read_json(path)
    if document.get("schema") != SCHEMA or not isinstance(document.get("tensors"), dict):
        raise DataError(f"{path}: not an index of schema {SCHEMA}")
    index: Index = {}
    for name, fields in document["tensors"].items():
        try:
            index[name] = _entry(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: tensor {name!r}: malformed entry ({error})") from error
        problem = _problem(index[name], directory, files)
        if problem is not None:
            raise DataError(f"{path}: tensor {name!r}: {problem}")
    return index


def _entry(fields: Any) -> TensorEntry:
    chunks = tuple(
        Chunk(
            file=str(chunk["file"]),
            start=_count(chunk["start"]),
            length=_count(chunk["length"]),
            offsets=_counts(chunk["offsets"]),
            sizes=_counts(chunk["sizes"]),
            sha256=str(chunk["sha256"]),
        )
        for chunk in fields["chunks"]
    )
    return TensorEntry(DTYPES[fields["dtype"]], _counts(fields["shape"]), chunks)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{values!r} is not a list of counts")
    return tuple(_count(value) for value in values)


def _problem(entry: TensorEntry, directory: Path, files: Mapping[str, int]) -> str | None:
    dims = len(entry.shape)
    for chunk in entry.chunks:
        if len(chunk.offsets) != dims or len(chunk.sizes) != dims:
            return "a chunk has another number of dimensions"
        ends = zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        if any(offset + size > whole for offset, size, whole in ends):
            return "a chunk lies outside the tensor"
        if chunk.length != math.prod(chunk.sizes) * entry.dtype.itemsize:
            return "a chunk's byte length differs from its sizes"
        if chunk.file not in files:
            try:
                return f"{inside(directory, chunk.file)} is not a file of this checkpoint"
            except DataError as error:
                return error.message
        if chunk.start + chunk.length > files[chunk.file]:
            return f"a chunk lies beyond the end of {chunk.file}"
    if sum(chunk.length for chunk in entry.chunks) != entry.nbytes:
        return "its chunks do not fill it"
    return "two of its chunks overlap" if _overlap(entry.chunks) else None


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether any two boxes share an element."""
    low = np.array([chunk.offsets for chunk in chunks])
    high = low + np.array([chunk.sizes for chunk in chunks])
    return any(((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i])).all(axis=1).any() for i in range(len(chunks) - 1))
