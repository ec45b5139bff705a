"""Safetensors files written front to back: headers from shapes alone, every tensor a block at a time.

Reading, casting and writing overlap and hold a few blocks, whatever the size of the model. A file's SHA-256 costs more
than writing it to a fast disk: it is computed once, of the bytes that the disk gives back, and a CRC shows that these
are the bytes that were handed to the system.
"""

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from tuner.checkpoint.storage import DTYPE_NAMES, tensor_bytes
from tuner.errors import MachineError, TunerError
from tuner.export.tensors import TensorSource
from tuner.runtime.files import (
    HASH_BLOCK_BYTES,
    NEW,
    TMP_PREFIX,
    free_bytes,
    fsync_dir,
    json_bytes,
    machine_error,
    opened,
    reading,
    write_all,
    write_new,
)
from tuner.runtime.safetensors_header import safetensors_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLUSH_BYTES = 64 << 20
"""Written before the disk is told to begin: left to itself the system waits for gigabytes, and the disk idles."""


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
    free = free_bytes(directory)
    if free < needed:
        place = directory.parent if directory.name.startswith(TMP_PREFIX) else directory
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
        write_new(directory / INDEX, json_bytes({"metadata": totals, "weight_map": places}))
    return written


def _write_shard(path: Path, outputs: Sequence[Output]) -> Written:
    outputs = sorted(outputs, key=lambda output: -output.dtype.itemsize)
    tensors = ((output.name, DTYPE_NAMES[output.dtype], output.source.shape) for output in outputs)
    header, _ = safetensors_header(tensors, {"format": "pt"})
    planned = len(header) + sum(output.nbytes for output in outputs)
    try:
        with opened(path, NEW) as descriptor:
            blocks = (tensor_bytes(block) for output in outputs for block in output.source.blocks(output.dtype))
            written = write_blocks(descriptor, chain([memoryview(header)], blocks))
        fsync_dir(path.parent)
    except OSError as error:
        raise machine_error(path, error, planned) from error
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
            write_all(descriptor, data)
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
    with reading(path), path.open("rb", buffering=0) as file:
        while data := file.read(HASH_BLOCK_BYTES):
            size, crc = size + len(data), zlib.crc32(data, crc)
            digest.update(data)
    return digest.hexdigest() if Written(size, crc) == written else None
