"""Where the tensors of a checkpoint lie in its files, by its index. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.checkpoint.manifest import INDEX_NAME
from tuner.checkpoint.shard_hash import Chunk
from tuner.errors import DataError
from tuner.runtime.files import inside, json_bytes, read_json
from tuner.runtime.safetensors_header import TYPES

if TYPE_CHECKING:
    import torch

SCHEMA = 2

@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its type by its safetensors name, global shape, and the chunks that fill it without overlap."""

    dtype_name: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type as torch has it."""
        import torch

        dtype: torch.dtype = getattr(torch, TYPES[self.dtype_name][0])
        return dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return TYPES[self.dtype_name][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


Index = dict[str, TensorEntry]


def index_bytes(index: Mapping[str, TensorEntry]) -> bytes:
    """The index as JSON."""
    tensors = {
        name: {
            "dtype": entry.dtype_name,
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
    dtype_name = str(fields["dtype"])
    if dtype_name not in TYPES:
        raise ValueError(f"{dtype_name!r} is no type that can be saved")
    return TensorEntry(dtype_name, _counts(fields["shape"]), chunks)


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
        if chunk.length != math.prod(chunk.sizes) * entry.itemsize:
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
    if len(chunks) < 2:
        return False
    import numpy as np  # which a run with nothing left to do need not wait for

    low = np.array([chunk.offsets for chunk in chunks])
    high = low + np.array([chunk.sizes for chunk in chunks])
    return any(((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i])).all(axis=1).any() for i in range(len(chunks) - 1))
