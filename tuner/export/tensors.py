"""Tensors of an export: where their values come from, and the safetensors files that they go to, a block at a time.

Values are read once and in order; files are written front to back, with headers from shapes alone. Reading, casting and
writing overlap and hold a few blocks, whatever the size of the model. A file's SHA-256 costs more than writing it to a
fast disk: it is computed once, of the bytes that the disk gives back, and a CRC shows that these are the bytes that
were handed to the system.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from tuner.checkpoint.index import TensorEntry
from tuner.checkpoint.shard_hash import Chunk
from tuner.checkpoint.storage import DTYPE_NAMES, tensor_bytes
from tuner.errors import DataError, MachineError, TunerError
from tuner.model.low_rank import LowRank
from tuner.runtime import files
from tuner.runtime.safetensors_header import safetensors_header

BLOCK_BYTES = 8 << 20
"""Of a block as it is read; a slice that is longer is a block of its own."""
AHEAD_BYTES = 8 << 20
"""Asked of the disk beyond what is read now."""
CHECKS_AHEAD = 4
"""Checks that may be pending: each holds what it checks in memory."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is read in slices of its first dimension; one without dimensions is a single slice.

    ``read(start, stop)`` gives slices in the source's type; each is asked for once, in increasing order. It raises
    DataError.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    @property
    def length(self) -> int:
        """How many slices there are."""
        return self.shape[0] if self.shape else 1

    def blocks(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """All of it in this type, cut along its first dimension."""
        slice_bytes = math.prod(self.shape[1:]) * max(self.dtype.itemsize, dtype.itemsize)
        step = max(1, BLOCK_BYTES // max(1, slice_bytes))
        for start in range(0, self.length if math.prod(self.shape) else 0, step):
            yield self.read(start, min(self.length, start + step)).to(dtype)

    def whole(self) -> torch.Tensor:
        """The whole tensor."""
        return self.read(0, self.length).reshape(self.shape)


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
        with files.reading(path):
            descriptor = self._open(path)
            # What comes after is what is read next, from this file: the disk may begin.
            os.posix_fadvise(descriptor, start + len(view), AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            while len(view):
                if not (done := os.preadv(descriptor, [view], start)):
                    raise DataError(f"{path}: ends early")
                view, start = view[done:], start + done

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
                self._stack.callback(os.close, self._descriptors[path])
            return self._descriptors[path]


def checkpoint_tensor(files: OpenFiles, directory: Path, name: str, entry: TensorEntry) -> TensorSource:
    """A tensor of a checkpoint, put together from the chunks of all ranks; each chunk's SHA-256 is checked.

    The check runs while more is read: `OpenFiles` raises its DataError.
    """
    return TensorSource(entry.shape, entry.dtype, _Chunks(files, directory, name, entry).read)


class _Chunks:
    def __init__(self, files: OpenFiles, directory: Path, name: str, entry: TensorEntry) -> None:
        self._files, self._directory, self._name, self._entry = files, directory, name, entry
        self._chunks = [chunk for chunk in entry.chunks if chunk.length]
        self._digests = {chunk: hashlib.sha256() for chunk in self._chunks}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `TensorSource`."""
        if not (shape := self._entry.shape):
            return self._part(self._chunks[0], 0, 1).reshape(())
        block = torch.empty((stop - start, *shape[1:]), dtype=self._entry.dtype)
        for chunk in self._chunks:
            first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            target = block[first - start : last - start]
            if chunk.sizes[1:] == shape[1:]:
                self._fill(target, chunk, first)
                continue
            for dim in range(1, len(shape)):
                target = target.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            target.copy_(self._part(chunk, first, last))
        return block

    def _part(self, chunk: Chunk, first: int, last: int) -> torch.Tensor:
        """Slices of the whole tensor, as far as they lie in the chunk."""
        part = torch.empty((last - first, *chunk.sizes[1:]), dtype=self._entry.dtype)
        self._fill(part, chunk, first)
        return part

    def _fill(self, target: torch.Tensor, chunk: Chunk, first: int) -> None:
        """Read whole slices of the chunk, from this one of the whole tensor on, into contiguous memory."""
        data = target.reshape(-1).view(torch.uint8)
        at = (first - chunk.offsets[0]) * (chunk.length // chunk.sizes[0]) if self._entry.shape else 0
        self._files.read_into(self._directory / chunk.file, chunk.start + at, data)
        self._files.check_meanwhile(lambda: self._check(chunk, data, at + len(data) == chunk.length))

    def _check(self, chunk: Chunk, data: torch.Tensor, is_last: bool) -> None:
        digest = self._digests[chunk]
        digest.update(data.numpy().data)
        if is_last and digest.hexdigest() != chunk.sha256:
            raise DataError(
                f"{self._directory / chunk.file}: the SHA-256 of {self._name} differs from the one that was recorded"
            )


def file_tensor(files: OpenFiles, path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSource:
    """A tensor that lies in one piece in a safetensors file, from byte ``start`` on."""
    slice_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(first: int, last: int) -> torch.Tensor:
        data = files.read(path, start + first * slice_bytes, (last - first) * slice_bytes)
        return data.view(dtype).reshape((last - first, *shape[1:]) if shape else ())

    return TensorSource(shape, dtype, read)


def held_tensor(tensor: torch.Tensor) -> TensorSource:
    """A tensor that is in memory."""
    shape = tuple(tensor.shape)
    return TensorSource(shape, tensor.dtype, lambda start, stop: tensor[start:stop] if shape else tensor)


def made_tensor(shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> TensorSource:
    """A tensor that is made when it is first read, and dropped after its last slice."""
    made = functools.cache(make)

    def read(start: int, stop: int) -> torch.Tensor:
        part = made()[start:stop] if shape else made()
        if stop == (shape[0] if shape else 1):
            made.cache_clear()
        return part

    return TensorSource(shape, dtype, read)


def mapped_tensor(
    source: TensorSource, dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...] | None = None,
) -> TensorSource:
    """What becomes of each slice of another tensor, in a type, and in its shape but where another is given."""
    return TensorSource(shape or source.shape, dtype, lambda start, stop: change(source.read(start, stop)))


def rounded_tensor(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """Another tensor's values in another type: what training held of a frozen weight."""
    return mapped_tensor(source, dtype, lambda block: block.to(dtype))


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of tensors of one shape in float32, added up in float64 in the order of the sequence."""
    total = sum((value.double() for value in values[1:]), values[0].double())
    return (total / len(values)).float()


def mean_tensor(sources: Sequence[TensorSource]) -> TensorSource:
    """The mean of tensors of one shape, of which a slice of each is read at a time."""
    first = sources[0]
    return TensorSource(
        first.shape, torch.float32, lambda start, stop: mean_of([source.read(start, stop) for source in sources])
    )


def grown_tensor(source: TensorSource, length: int) -> TensorSource:
    """A tensor with slices of zeros appended, as training appended them to what it left as it was."""

    def read(start: int, stop: int) -> torch.Tensor:
        block = torch.zeros((stop - start, *source.shape[1:]), dtype=source.dtype)
        if start < source.length:
            last = min(stop, source.length)
            block[: last - start] = source.read(start, last)
        return block

    return TensorSource((length, *source.shape[1:]), source.dtype, read)


def replaced_tensor(source: TensorSource, others: TensorSource, first: int) -> TensorSource:
    """A tensor whose slices from ``first`` on are another tensor's, in the wider of both types."""
    dtype = torch.promote_types(source.dtype, others.dtype)

    def read(start: int, stop: int) -> torch.Tensor:
        block = source.read(start, stop).to(dtype)
        low, high = max(start, first), min(stop, first + others.length)
        if low >= high:
            return block
        fresh = others.read(low - first, high - first).to(dtype)
        return torch.cat([block[: low - start], fresh, block[high - start :]])

    return TensorSource(source.shape, dtype, read)


def converted_tensors(
    source: TensorSource, convert: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, TensorSource]:
    """What published files hold in place of one tensor of the model: several, or another layout, by name.

    The tensor is read and converted whole when the first of them is asked for; each is dropped after its last slice.
    """
    results = functools.cache(lambda: convert(source.whole()))

    def made(name: str) -> torch.Tensor:
        return results().pop(name).contiguous()

    return {name: made_tensor(shape, source.dtype, functools.partial(made, name)) for name, shape in shapes.items()}


def merged_tensor(base: TensorSource, load: Callable[[], LowRank]) -> TensorSource:
    """W + s·B·A in float32, not rounded; with DoRA each output is then brought to its length.

    The adapter is loaded for the first block and dropped after the last.
    """
    adapter = functools.cache(load)
    # An output's length needs all of it, which of transposed weights lies in every slice.
    whole = functools.cache(lambda: adapter().added_to(base.read(0, base.length)))

    def read(start: int, stop: int) -> torch.Tensor:
        part = whole()[start:stop] if adapter().needs_all else adapter().added_to(base.read(start, stop), start)
        if stop == base.length:
            adapter.cache_clear()
            whole.cache_clear()
        return part

    return TensorSource(base.shape, torch.float32, read)


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLUSH_BYTES = 64 << 20
"""Written between two calls of ``fdatasync``: left to itself the system waits for gigabytes, and the disk idles."""


@dataclass(frozen=True)
class Written:
    """What was handed to the system for a file: bytes, and their CRC-32."""

    size: int
    crc: int


@dataclass(frozen=True)
class Output:
    """One tensor of an export: its published name, the type in which it is written, and where its values come from."""

    name: str
    dtype: torch.dtype
    source: TensorSource

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.source.shape) * self.dtype.itemsize


Shards = Mapping[str, Sequence[Output]]
"""Files by their names, and the tensors in each."""


def plan_shards(outputs: Sequence[Output], shard_size: int) -> Shards:
    """Cut the tensors, in their order, into files of at most ``shard_size`` bytes; a larger tensor has one alone."""
    by_name = {output.name: output for output in outputs}
    groups = groups_of({output.name: output.nbytes for output in outputs}, shard_size)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [WEIGHTS]
    return {name: [by_name[each] for each in group] for name, group in zip(names, groups, strict=True)}


def groups_of(sizes: Mapping[str, int], limit: float, first: int = 0, others: int = 0) -> list[list[str]]:
    """The names, in their order, in groups of at most ``limit`` bytes; one that is larger is alone.

    The first group has ``first`` bytes besides, each other one ``others``.
    """
    groups, used = [list[str]()], first
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = others
        groups[-1].append(name)
        used += size
    return groups


def require_space(directory: Path, needed: int) -> None:
    """Raise MachineError where so many bytes have no room in a directory."""
    free = files.free_bytes(directory)
    if free < needed:
        place = directory.parent if directory.name.startswith(files.TMP_PREFIX) else directory
        raise MachineError(
            f"{place}: the export needs {needed:,} bytes, {free:,} are free",
            hint="free disk space or give another --output",
        )


def write_shards(directory: Path, shards: Shards) -> dict[str, Written]:
    """Write all files and, where there are several, the index of names; returns what was handed to the system.

    Raises MachineError naming the file and the bytes it needs, and what the tensors' sources raise.
    """
    outputs = [output for group in shards.values() for output in group]
    require_space(directory, sum(output.nbytes for output in outputs))
    written = {name: _write_shard(directory / name, group) for name, group in shards.items()}
    if len(shards) > 1:
        totals = {
            "total_parameters": sum(math.prod(output.source.shape) for output in outputs),
            "total_size": sum(output.nbytes for output in outputs),
        }
        places = {output.name: name for name, group in shards.items() for output in group}
        files.write_new(directory / INDEX, files.json_bytes({"metadata": totals, "weight_map": places}))
    return written


def _write_shard(path: Path, outputs: Sequence[Output]) -> Written:
    outputs = sorted(outputs, key=lambda output: -output.dtype.itemsize)
    tensors = ((output.name, DTYPE_NAMES[output.dtype], output.source.shape) for output in outputs)
    header, _ = safetensors_header(tensors, {"format": "pt"})
    planned = len(header) + sum(output.nbytes for output in outputs)
    try:
        with files.opened(path, files.NEW) as descriptor:
            blocks = (tensor_bytes(block) for output in outputs for block in output.source.blocks(output.dtype))
            written = write_blocks(descriptor, chain([memoryview(header)], blocks))
        files.fsync_dir(path.parent)
    except OSError as error:
        raise files.machine_error(path, error, planned) from error
    if written.size != planned:
        raise TunerError(f"{path}: {written.size:,} bytes were written where {planned:,} were planned")
    return written


def write_blocks(descriptor: int, blocks: Iterator[memoryview]) -> Written:
    """Write what comes and flush it: a thread makes the next block meanwhile, another has the disk begin."""
    size = crc = unflushed = 0
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush") as flusher:
        flushed: Future[None] | None = None
        for data in _one_ahead(blocks):
            size, crc = size + len(data), zlib.crc32(data, crc)
            files.write_all(descriptor, data)
            unflushed += len(data)
            if unflushed >= FLUSH_BYTES and (flushed is None or flushed.done()):
                if flushed is not None:
                    flushed.result()
                flushed, unflushed = flusher.submit(os.fdatasync, descriptor), 0
        if flushed is not None:
            flushed.result()
        os.fsync(descriptor)
    return Written(size, crc)


def _one_ahead(blocks: Iterator[memoryview]) -> Iterator[memoryview]:
    """Each block, while a thread makes the next."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as reader:
        coming = reader.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = reader.submit(next, blocks, None)
            yield block


def sha256_of_same(path: Path, written: Written) -> str | None:
    """SHA-256 of a file that holds what was written; None where it holds anything else. Raises DataError."""
    digest, size, crc = hashlib.sha256(), 0, 0
    with files.reading(path), path.open("rb", buffering=0) as file:
        while data := file.read(files.HASH_BLOCK_BYTES):
            size, crc = size + len(data), zlib.crc32(data, crc)
            digest.update(data)
    return digest.hexdigest() if Written(size, crc) == written else None
