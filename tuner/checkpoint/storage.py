"""Tensors in files: one safetensors file per rank and a JSON index; tensors only, no pickle.

Each process says which boxes it has of which tensor; one that several have is written by one of them. One thread per
rank writes, and a failure is raised on every rank. Bytes are hashed while they are written.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tuner.checkpoint.index import Index, TensorEntry, index_bytes
from tuner.checkpoint.manifest import INDEX_NAME, shard_name
from tuner.checkpoint.shard_hash import HASHERS, Chunk, read_bytes, shard_sha256
from tuner.checkpoint.staging import Staged
from tuner.errors import TunerError
from tuner.runtime.files import fsync_dir, machine_error, write_all, write_new
from tuner.runtime.parts import Box, local, part_of
from tuner.runtime.process import Collective
from tuner.runtime.safetensors_header import TYPES, safetensors_header

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, (torch_name, _) in TYPES.items()}
"""The safetensors name of every dtype that can be saved."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WrittenFile:
    """A shard file as it was written: name, size in bytes, `shard_sha256` of the bytes handed to the system."""

    name: str
    size: int
    sha256: str
    chunks: list[tuple[str, Chunk]]
    """In the order of the file, each with its tensor's name."""


class _HeldBox(NamedTuple):
    """A box of a tensor that a process has."""

    name: str
    dtype: str
    """By its safetensors name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.box.sizes) * TYPES[self.dtype][1]

    @property
    def name_in_file(self) -> str:
        """The tensor's name; of a part of it also its offsets."""
        is_whole = self.shape == self.box.sizes
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.box.offsets))}"


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], staged: Staged | None, ranks: Collective
) -> list[WrittenFile]:
    """Write and flush every rank's file and the index; returns the files in rank order on rank 0. Collective.

    Raises MachineError naming the file and the bytes it needs.
    """
    if staged is not None:
        staged.wait()
    # Rank 0 alone has them all: of a thousand ranks they are hundreds of megabytes.
    pieces = ranks.together(lambda: _pieces(tensors))
    held = ranks.to_rank0(lambda: pieces)
    # Wide elements first: safetensors allows no gaps, and so every tensor starts at a multiple of its item size.
    dealt = (pieces[number] for number in ranks.from_rank0(lambda: _dealt(held)))
    own = sorted(dealt, key=lambda piece: (-TYPES[piece.dtype][1], piece.name, piece.box.offsets))
    parts = [local(tensors[one.name]) if staged is None else staged.tensors[one.name] for one in own]
    path = directory / shard_name(ranks.rank, ranks.size)
    written = ranks.to_rank0(lambda: _write_shard(path, own, parts))
    ranks.on_rank0(lambda: write_new(directory / INDEX_NAME, index_bytes(_index_of(held, written))))
    return written


def _pieces(tensors: Mapping[str, torch.Tensor]) -> list[_HeldBox]:
    """What this process has of each tensor. Raises TypeError for a type that cannot be saved."""
    found = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: dtype {tensor.dtype} cannot be saved")
        found += [_HeldBox(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), box) for box in _boxes(tensor)]
    return found


def _dealt(held: Sequence[Sequence[_HeldBox]]) -> list[list[int]]:
    """Of the boxes that each process has the numbers of those that it writes.

    One that several have goes to that of them with the fewest bytes so far.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for number, piece in enumerate(pieces):
            holders[piece.name, piece.box.offsets].append((rank, number))
    sizes, dealt = [0] * len(held), [list[int]() for _ in held]
    for of_box in holders.values():
        rank, number = min(of_box, key=lambda one: sizes[one[0]])
        sizes[rank] += max(held[rank][number].nbytes, 1)
        dealt[rank].append(number)
    return dealt


def _write_shard(path: Path, pieces: Sequence[_HeldBox], parts: Sequence[torch.Tensor]) -> WrittenFile:
    """Write boxes, each of what this process has of its tensor."""
    header, spans = safetensors_header((piece.name_in_file, piece.dtype, piece.box.sizes) for piece in pieces)
    size = len(header) + (spans[-1][1] if spans else 0)
    try:
        tensors = (
            piece.box.within(part) if part.numel() else part for piece, part in zip(pieces, parts, strict=True)
        )
        digest, of_chunks = _write_file(path, header, tensors, spans)
        fsync_dir(path.parent)
    except OSError as error:
        raise machine_error(path, error, size) from error
    chunks = [
        (one.name, Chunk(path.name, len(header) + start, end - start, one.box.offsets, one.box.sizes, sha256))
        for one, (start, end), sha256 in zip(pieces, spans, of_chunks, strict=True)
    ]
    return WrittenFile(path.name, size, digest, chunks)


def _index_of(held: Sequence[Sequence[_HeldBox]], written: Sequence[WrittenFile]) -> Index:
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for file in written:
        for name, chunk in file.chunks:
            chunks[name].append(chunk)
    return {
        piece.name: TensorEntry(
            piece.dtype, piece.shape, tuple(sorted(chunks[piece.name], key=lambda chunk: chunk.offsets))
        )
        for pieces in held
        for piece in pieces
    }


@torch.no_grad()
def read_into(directory: Path, index: Index, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's part of `tensors` from the files that the index names. Raises DataError naming the file."""
    planned = []
    for name, tensor in tensors.items():
        part = local(tensor.detach())
        for own in _boxes(tensor):
            for chunk in index[name].chunks:
                common = own.common(Box(chunk.offsets, chunk.sizes, (0,) * tensor.ndim))
                if common is not None:
                    planned.append((chunk, common, common.within(part)))
    for chunk, common, place in sorted(planned, key=lambda one: (one[0].file, one[0].start)):
        offsets = [own - of_chunk for own, of_chunk in zip(common.offsets, chunk.offsets, strict=True)]
        place.copy_(read_box(directory, place.dtype, chunk, offsets, common.sizes))


def _boxes(tensor: torch.Tensor) -> tuple[Box, ...]:
    """What this process has of a tensor; one without elements is a box that all processes have."""
    if isinstance(tensor, DTensor) and tensor.numel():
        return part_of(tensor).boxes
    zeros = (0,) * tensor.ndim
    return (Box(zeros, tuple(tensor.shape), zeros),)


def read_box(
    directory: Path, dtype: torch.dtype, chunk: Chunk, offsets: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Part of a chunk: `lengths` elements at `offsets` inside it, as a CPU tensor; reads only the rows it needs.

    Raises DataError naming the file.
    """
    rows, row_start = (lengths[0], offsets[0]) if chunk.sizes else (1, 0)
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    buffer = torch.empty(rows * row_bytes, dtype=torch.uint8)
    read_bytes(directory / chunk.file, chunk.start + row_start * row_bytes, buffer.numpy().data)
    box = buffer.view(dtype).reshape((rows, *chunk.sizes[1:]) if chunk.sizes else ())
    for dim in range(1, len(chunk.sizes)):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    return box


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a local tensor, row-major, as bytes; copies only what is not contiguous CPU memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_file(path: Path, header: bytes, tensors: Any, spans: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
    """`shard_sha256` of the file and the SHA-256 of each tensor in it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    digests: list[Future[str]] = []
    try:
        with ThreadPoolExecutor(max_workers=HASHERS, thread_name_prefix="sha256") as pool:
            write_all(descriptor, header)
            for number, (tensor, (start, end)) in enumerate(zip(tensors, spans, strict=True)):
                data = tensor_bytes(tensor)
                if len(data) != end - start:
                    raise TunerError(f"{path}: a tensor has {len(data):,} bytes where {end - start:,} were planned")
                digests.append(pool.submit(_sha256, data))
                write_all(descriptor, data)
                if tensor.is_cuda and number >= HASHERS:  # a copy stays in memory until it is hashed: a few at a time
                    digests[number - HASHERS].result()
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    of_tensors = [digest.result() for digest in digests]
    return shard_sha256([header], of_tensors), of_tensors


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
