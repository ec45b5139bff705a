"""Safetensors files written front to back: headers from shapes alone, every tensor a block at a time.

Reading, casting and writing overlap and hold a few blocks, whatever the size of the model. A file's SHA-256 costs more
than writing it to a fast disk: it is computed once, of the bytes that the disk gives back, and a weighted sum of each
piece shows that these are the bytes that were handed to the system.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tuner.checkpoint.index import safetensors_header
from tuner.checkpoint.storage import tensor_bytes
from tuner.errors import DataError, TunerError
from tuner.export.tensors import TensorSource
from tuner.runtime.files import fsync_dir, json_bytes, machine_error, write_all, write_new

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLUSH_BYTES = 64 << 20
"""Written before the disk is told to begin: left to itself the system waits for gigabytes, and the disk idles."""
SECTOR = 4096
_SPREAD, _ODD = np.uint64(0x9E3779B97F4A7C16), np.uint64(1)
Piece = tuple[int, int]
"""Length in bytes and weighted sum of a piece of a file."""


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


@dataclass(frozen=True)
class Shard:
    """One file and the tensors in it, in their order."""

    name: str
    outputs: tuple[Output, ...]


def plan_shards(outputs: Sequence[Output], shard_size: int) -> list[Shard]:
    """Cut the tensors, in their order, into files of at most ``shard_size`` bytes; a larger tensor has one alone."""
    groups: list[list[Output]] = [[]]
    room = shard_size
    for output in outputs:
        if groups[-1] and output.nbytes > room:
            groups.append([])
            room = shard_size
        groups[-1].append(output)
        room -= output.nbytes
    if len(groups) == 1:
        return [Shard(WEIGHTS, tuple(groups[0]))]
    names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
    return [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def write_shards(directory: Path, shards: Sequence[Shard]) -> dict[str, list[Piece]]:
    """Write all files and, where there are several, the index of names; returns what was handed to the system.

    Raises MachineError naming the file and the bytes it needs, and what the tensors' sources raise.
    """
    written = {shard.name: _write_shard(directory / shard.name, shard.outputs) for shard in shards}
    if len(shards) > 1:
        outputs = [output for shard in shards for output in shard.outputs]
        totals = {
            "total_parameters": sum(math.prod(output.source.shape) for output in outputs),
            "total_size": sum(output.nbytes for output in outputs),
        }
        places = {output.name: shard.name for shard in shards for output in shard.outputs}
        write_new(directory / INDEX, json_bytes({"metadata": totals, "weight_map": places}))
    return written


def _write_shard(path: Path, outputs: Sequence[Output]) -> list[Piece]:
    outputs = sorted(outputs, key=lambda output: -output.dtype.itemsize)
    tensors = ((output.name, output.dtype, output.source.shape) for output in outputs)
    header, _ = safetensors_header(tensors, {"format": "pt"})
    planned = len(header) + sum(output.nbytes for output in outputs)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            pieces = _write_blocks(descriptor, header, outputs)
        finally:
            os.close(descriptor)
        fsync_dir(path.parent)
    except OSError as error:
        raise machine_error(path, error, planned) from error
    if (size := sum(length for length, _ in pieces)) != planned:
        raise TunerError(f"{path}: {size:,} bytes were written where {planned:,} were planned")
    return pieces


def _write_blocks(descriptor: int, header: bytes, outputs: Sequence[Output]) -> list[Piece]:
    pieces, unflushed = [piece_of(header)], len(header)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush") as flusher:
        write_all(descriptor, header)
        flushed: Future[None] | None = None
        for data in _one_ahead(block for output in outputs for block in output.source.blocks(output.dtype)):
            pieces.append(piece_of(data))
            write_all(descriptor, data)
            unflushed += len(data)
            if unflushed >= FLUSH_BYTES and (flushed is None or flushed.done()):
                if flushed is not None:
                    flushed.result()
                flushed, unflushed = flusher.submit(os.fdatasync, descriptor), 0
        if flushed is not None:
            flushed.result()
        os.fsync(descriptor)
    return pieces


def _one_ahead(blocks: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of each block, while a thread reads the next."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as reader:
        coming = reader.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = reader.submit(next, blocks, None)
            yield tensor_bytes(block)


def piece_of(data: memoryview | bytes) -> Piece:
    """These bytes as a piece of a file."""
    return len(data), weighted_sum(data)


def weighted_sum(data: memoryview | bytes) -> int:
    """Sum modulo 2^64 of the 64-bit words, those of each 4 KiB sector times an odd weight of its place.

    A flipped bit changes it, and so do sectors that are missing, doubled or in each other's place.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = len(flat) // SECTOR * SECTOR
    sums = flat[:whole].view(np.uint64).reshape(-1, SECTOR // 8).sum(axis=1, dtype=np.uint64)
    last = np.zeros(SECTOR, dtype=np.uint8)
    last[: len(flat) - whole] = flat[whole:]
    sums = np.append(sums, last.view(np.uint64).sum(dtype=np.uint64))
    return int((sums * (np.arange(len(sums), dtype=np.uint64) * _SPREAD | _ODD)).sum(dtype=np.uint64))


def sha256_of_same(path: Path, pieces: Sequence[Piece]) -> str | None:
    """SHA-256 of a file whose pieces are those; None where it holds anything else. Raises DataError."""
    digest = hashlib.sha256()
    same = True
    try:
        with path.open("rb") as file:
            for length, total in pieces:
                data = file.read(length)
                same = same and piece_of(data) == (length, total)
                digest.update(data)
            same = same and os.fstat(file.fileno()).st_size == sum(length for length, _ in pieces)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest() if same else None
