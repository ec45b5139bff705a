"""Safetensors files written front to back: headers from shapes alone, every tensor a block of rows at a time.

Reading, casting and writing overlap and hold a few blocks, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tuner.checkpoint.index import DTYPE_NAMES
from tuner.errors import TunerError
from tuner.export.rows import Rows, blocks
from tuner.export.spans import Spans
from tuner.runtime.files import fsync_dir, json_bytes, machine_error, write_all, write_new

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLUSH_BYTES = 64 << 20
"""Written before the disk is told to begin: left to itself the system waits for gigabytes, and the disk idles."""


@dataclass(frozen=True)
class Output:
    """One tensor of an export: its published name, the type in which it is written, and where its values come from."""

    name: str
    dtype: torch.dtype
    rows: Rows

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.rows.shape) * self.dtype.itemsize


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


def write_shards(directory: Path, shards: Sequence[Shard]) -> dict[str, Spans]:
    """Write all files and, where there are several, the index of names; returns what was handed to the system.

    Raises MachineError naming the file and the bytes it needs, and what the tensors' sources raise.
    """
    written = {shard.name: _write_shard(directory / shard.name, shard) for shard in shards}
    if len(shards) > 1:
        outputs = [output for shard in shards for output in shard.outputs]
        totals = {
            "total_parameters": sum(math.prod(output.rows.shape) for output in outputs),
            "total_size": sum(output.nbytes for output in outputs),
        }
        places = {output.name: shard.name for shard in shards for output in shard.outputs}
        write_new(directory / INDEX, json_bytes({"metadata": totals, "weight_map": places}))
    return written


def write_one(path: Path, outputs: Sequence[Output]) -> dict[str, Spans]:
    """Write one file of any name; see `write_shards`."""
    return {path.name: _write_shard(path, Shard(path.name, tuple(outputs)))}


def header(outputs: Sequence[Output]) -> bytes:
    """The length-prefixed header of a file that holds these tensors without gaps, padded to 8 bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for output in outputs:
        end = start + output.nbytes
        kind = DTYPE_NAMES[output.dtype]
        fields[output.name] = {"dtype": kind, "shape": list(output.rows.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shard(path: Path, shard: Shard) -> Spans:
    # Wide types first: without gaps, every tensor then starts at a multiple of its item size.
    outputs = sorted(shard.outputs, key=lambda output: -output.dtype.itemsize)
    head = header(outputs)
    size = len(head) + sum(output.nbytes for output in outputs)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            spans = _write_blocks(descriptor, head, outputs)
        finally:
            os.close(descriptor)
        fsync_dir(path.parent)
    except OSError as error:
        raise machine_error(path, error, size) from error
    if spans.nbytes != size:
        raise TunerError(f"{path}: {spans.nbytes:,} bytes were written where {size:,} were planned")
    return spans


def _write_blocks(descriptor: int, head: bytes, outputs: Sequence[Output]) -> Spans:
    spans, unflushed = Spans(), len(head)
    spans.add(head)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush") as flusher:
        write_all(descriptor, head)
        flushed: Future[None] | None = None
        for data in _one_ahead(block for output in outputs for block in blocks(output.rows, output.dtype)):
            spans.add(data)
            write_all(descriptor, data)
            unflushed += len(data)
            if unflushed >= FLUSH_BYTES and (flushed is None or flushed.done()):
                if flushed is not None:
                    flushed.result()
                flushed, unflushed = flusher.submit(os.fdatasync, descriptor), 0
        if flushed is not None:
            flushed.result()
        os.fsync(descriptor)
    return spans


def _one_ahead(blocks: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of each block, while a thread reads the next."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read") as reader:
        coming = reader.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = reader.submit(next, blocks, None)
            yield block.contiguous().reshape(-1).view(torch.uint8).numpy().data
