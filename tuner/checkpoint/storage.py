"""Tensors in files: one safetensors file per rank and a JSON index; tensors only, no pickle.

DCP (torch.distributed.checkpoint) decides who writes and reads which box of which tensor; this file turns the decision
into bytes. What a process has of a tensor may be several boxes, where DCP knows one. One thread per rank writes, and a
failure is raised on every rank. Bytes are hashed while they are written.
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
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from tuner.checkpoint.index import Index, TensorEntry, index_bytes
from tuner.checkpoint.manifest import INDEX_NAME, shard_name
from tuner.checkpoint.shard_hash import HASHERS, Chunk, read_bytes, shard_sha256
from tuner.checkpoint.staging import Staged
from tuner.errors import TunerError
from tuner.runtime.files import fsync_dir, machine_error, write_all, write_new
from tuner.runtime.parts import part_of
from tuner.runtime.process import Collective
from tuner.runtime.safetensors_header import TYPES, safetensors_header

if TYPE_CHECKING:
    from tuner.runtime.parts import Box

INLINE_BYTES = 1 << 16
"""Below this size, handing a chunk to a thread costs more than hashing it."""


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


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner; it plans with the tensors, and gives out the bytes of a staged copy where there is one."""

    def __init__(self, staged: Staged | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staged = staged

    def create_local_plan(self) -> SavePlan:
        """The plan without empty chunks of tensors that are not empty; two such chunks may share one offset.

        Raises TypeError on a value that is not a tensor of a known dtype.
        """
        plan = super().create_local_plan()
        items = [own for item in plan.items for own in self._by_boxes(item)]
        return replace(plan, items=[item for item in items if _is_wanted(item)])

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What this process has of the tensor of that name; of one that is split, the box that begins there."""
        tensor = self.state_dict[index.fqn]
        part = _local(tensor) if self._staged is None else self._staged.tensors[index.fqn]
        if not isinstance(tensor, DTensor) or not tensor.numel():
            return part
        return next(box.within(part) for box in _boxes(tensor) if box.offsets == tuple(index.offset or ()))

    def _by_boxes(self, item: WriteItem) -> list[WriteItem]:
        """An item for each box of what this process has of a tensor."""
        tensor = self.state_dict[item.index.fqn]
        if not isinstance(tensor, DTensor) or not tensor.numel():
            return [item]
        found = []
        for box in _boxes(tensor):
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            facts = replace(_facts(item), chunk=chunk)
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            found.append(WriteItem(index, WriteItemType.SHARD, tensor_data=facts))
        return found


def write_shards(
    directory: Path, tensors: Mapping[str, torch.Tensor], staged: Staged | None, ranks: Collective
) -> list[WrittenFile]:
    """Write and flush every rank's file and the index; returns the files in rank order. Collective.

    Raises MachineError naming the file and the bytes it needs.
    """
    planner = _SavePlanner(staged)
    planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
    if staged is not None:
        staged.wait()
    local_plans = ranks.on_all_ranks(planner.create_local_plan)
    plans, metadata = planner.create_global_plan(local_plans)  # of the same plans, so the same on every rank
    path = directory / shard_name(ranks.rank, ranks.size)
    written = ranks.on_all_ranks(lambda: _write_shard(path, planner, planner.finish_plan(plans[ranks.rank])))
    ranks.on_rank0(lambda: write_new(directory / INDEX_NAME, index_bytes(_index_of(metadata, written))))
    return written


def _write_shard(path: Path, planner: _SavePlanner, plan: SavePlan) -> WrittenFile:
    items = sorted(plan.items, key=_file_order)
    facts = [_facts(item) for item in items]
    names = map(_name_in_file, items)
    header, spans = safetensors_header(
        (name, DTYPE_NAMES[one.properties.dtype], one.chunk.sizes) for name, one in zip(names, facts, strict=True)
    )
    size = len(header) + (spans[-1][1] if spans else 0)
    try:
        tensors = (planner.resolve_data(item) for item in items)
        digest, of_chunks = _write_file(path, header, tensors, spans)
        fsync_dir(path.parent)
    except OSError as error:
        raise machine_error(path, error, size) from error
    chunks = []
    for item, one, (start, end), sha256 in zip(items, facts, spans, of_chunks, strict=True):
        offsets, sizes = tuple(one.chunk.offsets), tuple(one.chunk.sizes)
        chunks.append((item.index.fqn, Chunk(path.name, len(header) + start, end - start, offsets, sizes, sha256)))
    return WrittenFile(path.name, size, digest, chunks)


def _index_of(metadata: Metadata, written: Sequence[WrittenFile]) -> Index:
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for file in written:
        for name, chunk in file.chunks:
            chunks[name].append(chunk)
    index: Index = {}
    for name, facts in metadata.state_dict_metadata.items():
        assert isinstance(facts, TensorStorageMetadata)  # plans hold nothing else
        ordered = tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets))
        index[name] = TensorEntry(DTYPE_NAMES[facts.properties.dtype], tuple(facts.size), ordered)
    return index


@torch.no_grad()
def read_into(directory: Path, index: Index, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's part of `tensors` from the files that the index names. Raises DataError naming the file."""
    facts = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=entry.dtype),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
        )
        for name, entry in index.items()
    }
    planned = []
    for name, tensor in tensors.items():
        chunks = {chunk.offsets: chunk for chunk in index[name].chunks}
        wanted = _wanted(tensor)
        places = {tuple(there.offsets): place for there, place in wanted}
        for item in create_read_items_for_chunk_list(name, facts[name], [there for there, _ in wanted]):
            place = places[tuple(item.dest_index.offset or ())]
            for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                place = place.narrow(dim, start, length)
            planned.append((chunks[tuple(item.storage_index.offset or ())], item, place))
    for chunk, item, place in sorted(planned, key=lambda one: (one[0].file, one[0].start)):
        dtype = index[item.storage_index.fqn].dtype
        place.copy_(read_box(directory, dtype, chunk, item.storage_offsets, item.lengths))


def _wanted(tensor: torch.Tensor) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
    """What this process has of a tensor: boxes of the whole, with the place in its memory of each."""
    part = _local(tensor.detach())
    if not isinstance(tensor, DTensor):
        return [(ChunkStorageMetadata(torch.Size([0] * part.ndim), part.shape), part)]
    return [
        (ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), box.within(part))
        for box in _boxes(tensor)
    ]


def _boxes(tensor: DTensor) -> tuple[Box, ...]:
    return part_of(tensor).boxes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def _facts(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn}: only tensors can be saved")
    return item.tensor_data


def _is_wanted(item: WriteItem) -> bool:
    facts = _facts(item)
    if facts.properties.dtype not in DTYPE_NAMES:
        raise TypeError(f"{item.index.fqn}: dtype {facts.properties.dtype} cannot be saved")
    return math.prod(facts.chunk.sizes) > 0 or math.prod(facts.size) == 0


def _file_order(item: WriteItem) -> tuple[int, str, tuple[int, ...]]:
    """Wide elements first: safetensors allows no gaps, and so every tensor starts at a multiple of its item size."""
    facts = _facts(item)
    return -facts.properties.dtype.itemsize, item.index.fqn, tuple(facts.chunk.offsets)


def _name_in_file(item: WriteItem) -> str:
    """The tensor's name; of a part of it also its offsets."""
    facts = _facts(item)
    is_whole = tuple(facts.size) == tuple(facts.chunk.sizes)
    return item.index.fqn if is_whole else f"{item.index.fqn}@{','.join(map(str, facts.chunk.offsets))}"


def _write_file(path: Path, header: bytes, tensors: Any, spans: Sequence[tuple[int, int]]) -> tuple[str, list[str]]:
    """`shard_sha256` of the file and the SHA-256 of each tensor in it."""
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
