"""Storage under DCP's planner: one safetensors file per rank and a JSON index; tensors only, no pickle.

DCP decides who writes and reads which box of which tensor; this file turns the decision into bytes. One thread per
rank writes, and a failure is raised, never left in a future. Hashing runs beside the write, on the same bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from tuner.checkpoint.hashes import HASHERS, shard_sha256
from tuner.checkpoint.header import safetensors_header
from tuner.checkpoint.index import DTYPE_NAMES, Chunk, Index, TensorEntry, index_bytes
from tuner.checkpoint.manifest import INDEX_NAME, shard_name
from tuner.errors import DataError, TunerError
from tuner.runtime.files import fsync_dir, machine_error, write_all, write_new

INLINE_BYTES = 1 << 16
"""Below this size, handing a chunk to a thread costs more than hashing it."""


@dataclass(frozen=True)
class WrittenFile:
    """A shard file as it was written: name, size in bytes, `shard_sha256` of the bytes handed to the system."""

    name: str
    size: int
    sha256: str


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a local tensor, row-major, as bytes; copies only what is not contiguous CPU memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class SafetensorsWriter(StorageWriter):
    """Writes this rank's chunks to its file in `directory`, and on the coordinator the index.

    `world_size` counts the ranks that take part.
    """

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.directory = directory
        self.rank = rank
        self.world_size = world_size
        self._written: WrittenFile | None = None

    def result(self) -> WrittenFile:
        """This rank's file. Raises RuntimeError before `write_data`."""
        if self._written is None:
            raise RuntimeError("nothing was written")
        return self._written

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was written."""
        self._written = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the directory exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Drop empty chunks of tensors that are not empty; two such chunks may share one offset.

        Raises TypeError on a value that is not a tensor of a known dtype.
        """
        return replace(plan, items=[item for item in plan.items if _wanted(item)])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Every rank already knows its file."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write and flush this rank's file. Raises MachineError naming the file and the bytes it needs."""
        items = sorted(plan.items, key=_file_order)
        name = shard_name(self.rank, self.world_size)
        header, spans = _layout(items)
        size = len(header) + (spans[-1][1] if spans else 0)
        path = self.directory / name
        try:
            tensors = (planner.resolve_data(item) for item in items)
            digest, of_chunks = _write_file(path, header, tensors, spans)
            fsync_dir(self.directory)
        except OSError as error:
            raise machine_error(path, error, size) from error
        self._written = WrittenFile(name, size, digest)
        results = []
        for item, (start, end), sha256 in zip(items, spans, of_chunks, strict=True):
            offsets, sizes = _box(item)
            chunk = Chunk(name, len(header) + start, end - start, offsets, sizes, sha256)
            results.append(WriteResult(item.index, end - start, chunk))
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index (coordinator only). Raises MachineError."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (result for of_rank in results for result in of_rank):
            chunks[result.index.fqn].append(result.storage_data)
        index: Index = {}
        for name, facts in metadata.state_dict_metadata.items():
            if not isinstance(facts, TensorStorageMetadata):
                raise TypeError(f"{name}: only tensors can be saved")
            ordered = tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
            index[name] = TensorEntry(facts.properties.dtype, tuple(facts.size), ordered)
        write_new(self.directory / INDEX_NAME, index_bytes(index))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


class SafetensorsReader(StorageReader):
    """Reads chunks from `directory`, as its `index` places them."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in self.index.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read in the order of the files."""
        return replace(plan, items=sorted(plan.items, key=lambda item: self._place(item.storage_index)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read on their own."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Copy every planned box into the planner's tensor. Raises DataError naming the file."""
        for item in plan.items:
            entry = self.index[item.storage_index.fqn]
            chunk = self._chunk(item.storage_index)
            box = read_box(self.directory, entry.dtype, chunk, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.shape != box.shape or target.dtype != box.dtype:
                raise DataError(f"{item.storage_index.fqn}: {tuple(box.shape)} does not fit {tuple(target.shape)}")
            target.copy_(box)
            planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def _chunk(self, place: MetadataIndex) -> Chunk:
        chunks = self.index[place.fqn].chunks
        if place.index is not None and place.index < len(chunks) and chunks[place.index].offsets == place.offset:
            return chunks[place.index]
        return next(chunk for chunk in chunks if chunk.offsets == place.offset)

    def _place(self, place: MetadataIndex) -> tuple[str, int]:
        chunk = self._chunk(place)
        return chunk.file, chunk.start


def read_box(
    directory: Path, dtype: torch.dtype, chunk: Chunk, offsets: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Part of a chunk: `lengths` elements at `offsets` inside it, as a CPU tensor; reads only the rows it needs.

    Raises DataError naming the file.
    """
    rows, row_start = (lengths[0], offsets[0]) if chunk.sizes else (1, 0)
    row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
    buffer = torch.empty(rows * row_bytes, dtype=torch.uint8)
    _read_into(directory / chunk.file, chunk.start + row_start * row_bytes, buffer.numpy().data)
    box = buffer.view(dtype).reshape((rows, *chunk.sizes[1:]) if chunk.sizes else ())
    for dim in range(1, len(chunk.sizes)):
        box = box.narrow(dim, offsets[dim], lengths[dim])
    return box


def _read_into(path: Path, start: int, view: memoryview) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise DataError(f"{path}: ends early")
                view = view[count:]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _wanted(item: WriteItem) -> bool:
    facts = item.tensor_data
    if facts is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    if facts.properties.dtype not in DTYPE_NAMES:
        raise TypeError(f"{item.index.fqn}: dtype {facts.properties.dtype} cannot be saved")
    return math.prod(facts.chunk.sizes) > 0 or math.prod(facts.size) == 0


def _box(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _dtype(item: WriteItem) -> torch.dtype:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    return item.tensor_data.properties.dtype


def _file_order(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    """Wide elements first: safetensors allows no gaps, and so every tensor starts at a multiple of its item size."""
    return -_dtype(item).itemsize, item.index.fqn, _box(item)[0]


def _layout(items: Sequence[WriteItem]) -> tuple[bytes, list[tuple[int, int]]]:
    """The file's header, and each item's byte span after it."""

    def name(item: WriteItem) -> str:
        offsets, sizes = _box(item)
        whole = item.tensor_data is not None and tuple(item.tensor_data.size) == sizes
        return item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, offsets))}"

    return safetensors_header((name(item), _dtype(item), _box(item)[1]) for item in items)


def _write_file(path: Path, header: bytes, tensors: Any, spans: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
    """`shard_sha256` of the file and the SHA-256 of each tensor in it. Hashing runs beside the writing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    digests: list[Future[str] | str] = []
    try:
        with ThreadPoolExecutor(max_workers=HASHERS, thread_name_prefix="sha256") as pool:
            write_all(descriptor, header)
            for number, (tensor, (start, end)) in enumerate(zip(tensors, spans, strict=True)):
                data = tensor_bytes(tensor)
                if len(data) != end - start:
                    raise TunerError(f"{path}: a tensor has {len(data):,} bytes where {end - start:,} were planned")
                digests.append(pool.submit(_sha256, data) if len(data) > INLINE_BYTES else _sha256(data))
                write_all(descriptor, data)
                if tensor.is_cuda and number >= HASHERS:  # a copy stays in memory until it is hashed: a few at a time
                    _known(digests[number - HASHERS])
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    of_tensors = [_known(digest) for digest in digests]
    return shard_sha256([header], of_tensors), of_tensors


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _known(digest: Future[str] | str) -> str:
    return digest if isinstance(digest, str) else digest.result()


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors in full, however many ranks share them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
