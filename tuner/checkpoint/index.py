"""Where the tensors of a checkpoint lie in its files, by its index. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tuner.checkpoint.manifest import INDEX_NAME
from tuner.checkpoint.shard_hash import Chunk, Count
from tuner.errors import DataError
from tuner.runtime.files import inside, json_bytes, read_json
from tuner.runtime.safetensors_header import TYPES

if TYPE_CHECKING:
    import torch

SCHEMA = 2


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its type by its safetensors name, global shape, and the chunks that fill it without overlap."""

    dtype_name: Annotated[str, Field(alias="dtype")]
    shape: tuple[Count, ...]
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
_ENTRY = TypeAdapter(TensorEntry)


def index_bytes(index: Mapping[str, TensorEntry]) -> bytes:
    """The index as JSON."""
    tensors = {name: _ENTRY.dump_python(entry, by_alias=True) for name, entry in index.items()}
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
            index[name] = _ENTRY.validate_python(fields)
        except ValidationError as error:
            raise DataError(f"{path}: tensor {name!r}: malformed entry ({error.errors()[0]['msg']})") from error
        problem = _problem(index[name], directory, files)
        if problem is not None:
            raise DataError(f"{path}: tensor {name!r}: {problem}")
    return index


def _problem(entry: TensorEntry, directory: Path, files: Mapping[str, int]) -> str | None:
    if entry.dtype_name not in TYPES:
        return f"{entry.dtype_name!r} is no type that can be saved"
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
