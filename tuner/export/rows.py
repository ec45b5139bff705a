"""Where the values of an exported tensor come from: read once, in order, a block of rows at a time."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tuner.checkpoint.index import Chunk, TensorEntry
from tuner.errors import DataError

BLOCK_BYTES = 8 << 20
"""Of a block as it is read; a row that is longer is a block of its own."""
AHEAD_BYTES = 8 << 20
"""Asked of the disk beyond what is read now."""
CHECKS_AHEAD = 4
"""Checks that may be owed: each holds what it checks in memory."""


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


def blocks(rows: Rows, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """All of it in this type, cut along its rows."""
    count = n_rows(rows.shape)
    row_bytes = math.prod(rows.shape[1:]) * max(rows.dtype.itemsize, dtype.itemsize)
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, count if math.prod(rows.shape) else 0, step):
        yield rows.read(start, min(count, start + step)).to(dtype)


def read_all(rows: Rows) -> torch.Tensor:
    """The whole tensor."""
    return rows.read(0, n_rows(rows.shape)).reshape(rows.shape)


class OpenFiles:
    """Files held open while their parts are read, and a thread that checks what was read; the context ends both."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._stack = ExitStack()
        self._checker = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="check"))
        self._checks: deque[Future[None]] = deque()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._descriptors.clear()
        with self._stack:
            while self._checks and kind is None:
                self._checks.popleft().result()

    def check_meanwhile(self, check: Callable[[], None]) -> None:
        """Have the thread do this; what it raises is raised by a later call, at the latest when the context ends."""
        while len(self._checks) >= CHECKS_AHEAD:
            self._checks.popleft().result()
        self._checks.append(self._checker.submit(check))

    def read(self, path: Path, start: int, count: int) -> torch.Tensor:
        """``count`` bytes from byte ``start`` on, uint8. Raises DataError naming the file."""
        buffer = torch.empty(count, dtype=torch.uint8)
        self.read_into(path, start, buffer)
        return buffer

    def read_into(self, path: Path, start: int, buffer: torch.Tensor) -> None:
        """Fill a tensor of contiguous bytes from byte ``start`` on. Raises DataError naming the file."""
        view = buffer.numpy().data
        try:
            descriptor = self._open(path)
            # What comes after is what is read next, from this file: the disk may begin.
            os.posix_fadvise(descriptor, start + len(view), AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            while len(view):
                done = os.preadv(descriptor, [view], start)
                if not done:
                    raise DataError(f"{path}: ends early")
                view, start = view[done:], start + done
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
                self._stack.callback(os.close, self._descriptors[path])
            return self._descriptors[path]


class CheckpointRows:
    """A tensor of a checkpoint, put together from the chunks of all ranks; each chunk's SHA-256 is checked.

    The check runs beside the reading: `OpenFiles` raises its DataError.
    """

    def __init__(self, files: OpenFiles, directory: Path, name: str, entry: TensorEntry) -> None:
        self.shape, self.dtype = entry.shape, entry.dtype
        self._files, self._directory, self._name = files, directory, name
        self._chunks = [chunk for chunk in entry.chunks if chunk.length]
        self._digests = {chunk: hashlib.sha256() for chunk in self._chunks}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        if not self.shape:
            return self._part(self._chunks[0], 0, 1).reshape(())
        block = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for chunk in self._chunks:
            first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            place = block[first - start : last - start]
            if chunk.sizes[1:] == self.shape[1:]:
                self._fill(place, chunk, first)
                continue
            for dim in range(1, len(self.shape)):
                place = place.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            place.copy_(self._part(chunk, first, last))
        return block

    def _part(self, chunk: Chunk, first: int, last: int) -> torch.Tensor:
        """Rows of the whole tensor, as far as they lie in the chunk."""
        part = torch.empty((last - first, *chunk.sizes[1:]), dtype=self.dtype)
        self._fill(part, chunk, first)
        return part

    def _fill(self, place: torch.Tensor, chunk: Chunk, first: int) -> None:
        """Read whole rows of the chunk, from this row of the whole tensor on, into contiguous memory."""
        data = place.reshape(-1).view(torch.uint8)
        at = (first - chunk.offsets[0]) * (chunk.length // chunk.sizes[0]) if self.shape else 0
        self._files.read_into(self._directory / chunk.file, chunk.start + at, data)
        self._files.check_meanwhile(lambda: self._check(chunk, data, at + len(data) == chunk.length))

    def _check(self, chunk: Chunk, data: torch.Tensor, is_last: bool) -> None:
        digest = self._digests[chunk]
        digest.update(data.numpy().data)
        if is_last and digest.hexdigest() != chunk.sha256:
            raise DataError(
                f"{self._directory / chunk.file}: the SHA-256 of {self._name} differs from the one that was recorded"
            )


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


class GrownRows:
    """A tensor with rows of zeros appended, as training appended them to what it left as it was."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.shape, self.dtype = (count, *rows.shape[1:]), rows.dtype
        self._rows = rows

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        there = n_rows(self._rows.shape)
        parts = [self._rows.read(start, min(stop, there))] if start < there else []
        empty = torch.zeros((stop - max(start, there), *self.shape[1:]), dtype=self.dtype) if stop > there else None
        return torch.cat(parts if empty is None else [*parts, empty])


class ReplacedRows:
    """A tensor whose rows from ``first`` on are another tensor's, in the wider of both types."""

    def __init__(self, rows: Rows, others: Rows, first: int) -> None:
        self.shape, self.dtype = rows.shape, torch.promote_types(rows.dtype, others.dtype)
        self._rows, self._others = rows, others
        self._first, self._last = first, first + n_rows(others.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Rows`."""
        block = self._rows.read(start, stop).to(self.dtype)
        first, last = max(start, self._first), min(stop, self._last)
        if first >= last:
            return block
        others = self._others.read(first - self._first, last - self._first).to(self.dtype)
        return torch.cat([block[: first - start], others, block[last - start :]])


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
