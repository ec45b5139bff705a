"""Where the values of an exported tensor come from: read once, in order, a block of rows at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tuner.checkpoint.index import Chunk, TensorEntry
from tuner.errors import DataError


class Rows(Protocol):
    """A tensor that is read along its first dimension; one without dimensions has a single row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of what `read` gives."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``; every row is asked for once, in increasing order. Raises DataError."""


def n_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape."""
    return shape[0] if shape else 1


def read_all(rows: Rows) -> torch.Tensor:
    """The whole tensor."""
    return rows.read(0, n_rows(rows.shape)).reshape(rows.shape)


class OpenFiles:
    """Files held open while their parts are read; closed with the context."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._descriptors.clear()
        self._stack.close()

    def read(self, path: Path, start: int, count: int) -> torch.Tensor:
        """``count`` bytes from byte ``start`` on, uint8. Raises DataError naming the file."""
        buffer = torch.empty(count, dtype=torch.uint8)
        view = buffer.numpy().data
        try:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
                self._stack.callback(os.close, self._descriptors[path])
            while len(view):
                done = os.preadv(self._descriptors[path], [view], start)
                if not done:
                    raise DataError(f"{path}: ends early")
                view, start = view[done:], start + done
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        return buffer


class CheckpointRows:
    """A tensor of a checkpoint, put together from the chunks of all ranks; each chunk's SHA-256 is checked."""

    def __init__(self, files: OpenFiles, directory: Path, name: str, entry: TensorEntry) -> None:
        self.shape, self.dtype = entry.shape, entry.dtype
        self._files, self._directory, self._name = files, directory, name
        self._chunks = [chunk for chunk in entry.chunks if chunk.length]
        self._digests = {chunk: hashlib.sha256() for chunk in self._chunks}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        if not self.shape:
            return self._part(self._chunks[0], 0, 1)
        wanted = [(c, max(start, c.offsets[0]), min(stop, c.offsets[0] + c.sizes[0])) for c in self._chunks]
        parts = [part for part in wanted if part[1] < part[2]]
        if len(parts) == 1 and parts[0][1:] == (start, stop) and parts[0][0].sizes[1:] == self.shape[1:]:
            return self._part(*parts[0])
        block = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for chunk, first, last in parts:
            place = block[first - start : last - start]
            for dim in range(1, len(self.shape)):
                place = place.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            place.copy_(self._part(chunk, first, last))
        return block

    def _part(self, chunk: Chunk, first: int, last: int) -> torch.Tensor:
        """Rows of the whole tensor, as far as they lie in the chunk."""
        shape = (last - first, *chunk.sizes[1:]) if self.shape else ()
        row_bytes = chunk.length // n_rows(chunk.sizes)
        at = (first - chunk.offsets[0]) * row_bytes if self.shape else 0
        data = self._files.read(self._directory / chunk.file, chunk.start + at, (last - first) * row_bytes)
        digest = self._digests[chunk]
        digest.update(data.numpy().data)
        if at + len(data) == chunk.length and digest.hexdigest() != chunk.sha256:
            raise DataError(
                f"{self._directory / chunk.file}: the SHA-256 of {self._name} differs from the one that was recorded",
                hint="the file was damaged after it was saved: export another checkpoint of the run",
            )
        return data.view(self.dtype).reshape(shape)


@dataclass(frozen=True)
class FileRows:
    """A tensor that lies in one piece in a safetensors file."""

    files: OpenFiles
    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        row_bytes = self.dtype.itemsize
        for size in self.shape[1:]:
            row_bytes *= size
        data = self.files.read(self.path, self.start + start * row_bytes, (stop - start) * row_bytes)
        return data.view(self.dtype).reshape((stop - start, *self.shape[1:]) if self.shape else ())


@dataclass(frozen=True)
class HeldRows:
    """A tensor that is in memory."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """See `Rows`."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        return self.tensor[start:stop] if self.tensor.dim() else self.tensor


@dataclass(frozen=True)
class RoundedRows:
    """Another tensor's values in another type: what training held of a frozen weight."""

    rows: Rows
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Rows`."""
        return self.rows.shape

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        return self.rows.read(start, stop).to(self.dtype)


class Conversion:
    """One tensor of the model that the published files hold as several, or in another layout."""

    def __init__(self, rows: Rows, convert: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        self._rows, self._convert = rows, convert
        self._made: dict[str, torch.Tensor] | None = None

    def take(self, name: str) -> torch.Tensor:
        """One of the results, given away; the tensor is read and converted whole when the first is asked for."""
        if self._made is None:
            self._made = self._convert(read_all(self._rows))
        return self._made.pop(name)


class ConvertedRows:
    """One result of a `Conversion`."""

    def __init__(self, conversion: Conversion, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._conversion, self._name = conversion, name
        self._tensor: torch.Tensor | None = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        if self._tensor is None:
            self._tensor = self._conversion.take(self._name).contiguous()
        part = self._tensor[start:stop] if self.shape else self._tensor
        if stop == n_rows(self.shape):
            self._tensor = None
        return part
