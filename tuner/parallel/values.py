"""The values of a model on its device: read from the files by each process, or sent from rank 0, in blocks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tuner.errors import DataError
from tuner.model.root import CausalLM
from tuner.model.unread import InFile, UnreadWeights, WeightPiece, in_files, mapped, sampled
from tuner.parallel.fsdp import is_whole_along
from tuner.runtime.parts import Box, TensorPart, part_of
from tuner.runtime.process import Collective, gloo_group
from tuner.runtime.torch_private import to_empty
from tuner.runtime.warned import pass_on

# Parts of files that go to a device: read ahead by threads, in blocks that are used again, and copied from there.
#
# A mapped file is read a page at a time, by whoever copies it; what a device is given out of pageable memory its driver
# copies once more. Threads that read into page-locked blocks keep a disk busy, or take a page cache at the speed of
# memory, and a copy out of these takes a tenth of the reading.

BLOCK = 4 << 20
"""Bytes that are read at once."""
READERS = 4


class _Landing(NamedTuple):
    """A block that is being read, and where its elements go."""

    block: torch.Tensor
    dtype: torch.dtype
    target: torch.Tensor
    reading: Future[None]


class FileBlocks:
    """A context in which tensors on a device get what lies in files; they have it when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._locked = device.type == "cuda"
        self._free: list[torch.Tensor] = []
        self._n_blocks = 0
        self._landing: deque[_Landing] = deque()
        self._files: dict[str, int] = {}
        self._contents: dict[str, torch.Tensor] = {}
        self._open = ExitStack()
        self._readers = ThreadPoolExecutor(READERS, "weights")

    def __enter__(self) -> FileBlocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while self._landing and kind is None:
                self._land()
        finally:
            self._readers.shutdown(cancel_futures=True)
            self._open.close()

    def give(self, target: torch.Tensor, place: InFile, first: int = 0) -> None:
        """Give a contiguous tensor the elements of a place in a file, from the one with number ``first`` on.

        They are cast where they go. Raises DataError where the file ends before them.
        """
        size, flat = place.dtype.itemsize, target.view(-1)
        step = BLOCK // size
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            block = self._block()
            wanted = block.numpy()[: part.numel() * size].data
            start = place.start + (first + begin) * size
            read = partial(_read_range, self._file(place.path), place.path, start, wanted)
            self._landing.append(_Landing(block, place.dtype, part, self._readers.submit(read)))

    def content(self, path: str) -> torch.Tensor:
        """The bytes of a file, mapped: for what does not lie end to end there. Raises OSError."""
        if path not in self._contents:
            self._contents[path] = mapped(path)
        return self._contents[path]

    def _block(self) -> torch.Tensor:
        """A free block. There are two for each reader, so that none waits for a copy to the device."""
        if not self._free:
            if self._n_blocks == 2 * READERS:
                self._land()
            else:
                self._n_blocks += 1
                self._free.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self._locked))
        return self._free.pop()

    def _land(self) -> None:
        """Copy the oldest block to its target. The copy is synchronous: the block is free when it returns."""
        landing = self._landing.popleft()
        landing.reading.result()
        count = landing.target.numel()
        with torch.no_grad():
            landing.target.copy_(landing.block.view(landing.dtype)[:count].to(landing.target.device))
        self._free.append(landing.block)

    def _file(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._open.callback(os.close, self._files[path])
        return self._files[path]


def _read_range(file: int, path: str, start: int, wanted: memoryview) -> None:
    """Fill memory with the bytes of a file from ``start`` on; a thread that reads leaves the interpreter to others."""
    done = 0
    while done < len(wanted):
        if not (count := os.preadv(file, [wanted[done:]], start + done)):
            raise DataError(f"{path}: it ends before byte {start + len(wanted)}: it was changed while it was read")
        done += count


_BLOCK = 1 << 25
"""Bytes that are sent at once."""


def bring(
    root: CausalLM, device: torch.device, types: Mapping[torch.Tensor, torch.dtype], unread: UnreadWeights | None = None
) -> None:
    """Bring the model of one process to a device; what lies in files goes there in blocks, and never into the host's
    memory whole.

    ``types`` has those of the parameters that are to have another one there: they are cast on the device. ``unread``
    has those that nobody has read.
    """
    named = dict(_tensors(root))
    with FileBlocks(device) as blocks:
        for name, pieces in _pieces({name: one.detach() for name, one in named.items()}, unread).items():
            tensor = named[name]
            moved = torch.empty(tensor.shape, dtype=types.get(tensor, tensor.dtype), device=device)
            _read(moved, _all_of(moved), pieces, blocks)
            tensor.data = moved
    root.to(device)
    for tensor, dtype in types.items():
        tensor.data = tensor.data.to(dtype)


def materialise(
    root: CausalLM, source: CausalLM | None, device: torch.device, unread: UnreadWeights | None = None,
    on_host: bool = False,
) -> None:
    """Give a meta model, in shards or whole, its storage and the values of rank 0's ``source``.

    What lies in files there (:mod:`tuner.model.unread`), or was left in them (``unread``), each process reads itself,
    its own part alone, where all of them have these files. The rest is sent in blocks of rows: what was drawn,
    quantised, fused or cast on rank 0.
    Buffers are given too: non-persistent ones (rotary frequencies) are in no file and hold garbage after meta.

    Collective; ``source`` and ``unread`` count on rank 0 alone. With ``on_host`` FSDP2's shards stay in the host's
    memory; buffers, and what each process keeps whole, are on the device as ever. Host memory beyond the shards: a
    block. Raises RuntimeError where a tensor's type does not hold the values of the source's.
    """
    _give_storage(root, lambda one: torch.device("cpu") if on_host and not is_whole_along(one) else device)
    own = {} if source is None or dist.get_rank() else {name: one.detach() for name, one in _tensors(source)}
    everyone = Collective(gloo_group())
    types, pieces = everyone.on_rank0(lambda: ({name: one.dtype for name, one in own.items()}, _pieces(own, unread)))
    readable = _readable({piece.place for of_one in pieces.values() for piece in of_one})
    with torch.no_grad(), FileBlocks(device) as blocks:
        for name, target in _tensors(root):
            if torch.promote_types(types[name], target.dtype) != target.dtype:
                raise RuntimeError(f"{name} is {types[name]} at the source and {target.dtype} in the sharded model")
            if name in pieces and all(piece.place.path in readable for piece in pieces[name]):
                local, part = _local(target)
                _read(local, part, pieces[name], blocks)
            else:
                whole = own.get(name)
                fill(target, whole if whole is None or unread is None else unread.whole(whole), types[name])


def _pieces(tensors: Mapping[str, torch.Tensor], unread: UnreadWeights | None) -> dict[str, tuple[WeightPiece, ...]]:
    """Where the elements of those tensors lie that are in files: of most in one place."""
    found = {} if unread is None else {name: unread.pieces(tensor) for name, tensor in tensors.items()}
    left = {name: pieces for name, pieces in found.items() if pieces is not None}
    return {name: (WeightPiece(_box_of(place.shape), place),) for name, place in in_files(tensors).items()} | left


def _read(local: torch.Tensor, part: TensorPart, pieces: Sequence[WeightPiece], blocks: FileBlocks) -> None:
    """Give a process its part of a tensor out of files: rows by blocks; of parts of rows no more than these."""
    for box in part.boxes:
        for piece in pieces:
            if (common := box.common(piece.box)) is None:
                continue
            target = common.within(local)
            there = piece.of(common, blocks.content(piece.place.path))
            if target.is_contiguous() and there.is_contiguous():
                blocks.give(target, piece.place, piece.first(there))
            else:
                target.copy_(there.to(local.device))


@torch.no_grad()
def fill(
    target: torch.Tensor, whole: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> None:
    """Give a process its part of a tensor of this type, whose rows it is sent by who has the ``whole``. Collective.

    ``shape`` is that of its first rows where the ``whole`` has no more.
    """
    local, part = _local(target)
    for start, stop in _blocks(target.shape if shape is None else shape, dtype):
        rows = None if whole is None else whole[start:stop] if whole.ndim else whole
        rows = _sent(rows, (stop - start, *target.shape[1:]) if target.ndim else (), dtype, local.device)
        for box in part.boxes:
            if (own := box.within_rows(start, stop)) is not None:
                own.within(local).copy_(own.of(rows))  # cast where it goes


def _local(target: torch.Tensor) -> tuple[torch.Tensor, TensorPart]:
    """What a process has of a tensor, and which elements these are."""
    return (target.to_local(), part_of(target)) if isinstance(target, DTensor) else (target, _all_of(target))


def _readable(places: Collection[InFile]) -> set[str]:
    """The files that every process has as rank 0 has them. Collective."""
    by_file: dict[str, list[InFile]] = {}
    for place in sorted(places, key=lambda place: (place.path, place.start)):
        by_file.setdefault(place.path, []).append(place)
    everyone = Collective(gloo_group())
    own = {path: _sample(path, there) for path, there in by_file.items()}
    wanted = everyone.on_rank0(lambda: own)
    # What is not as on rank 0, and whether it is there: of most ranks nothing.
    lacks = {path: sample is not None for path, sample in own.items() if not sample or sample != wanted[path]}
    of_all = everyone.on_all_ranks(lambda: lacks)
    for rank, lacked in enumerate(of_all):
        different = [path for path, is_there in lacked.items() if is_there]
        if different and not everyone.rank:
            pass_on(f"rank {rank} has other weights in {different[0]}: those of rank 0 are sent")
    return own.keys() - {path for lacked in of_all for path in lacked}


def _sample(path: str, places: Sequence[InFile]) -> str | None:
    """A hash of a few bytes of each place of a file; None where it is not here, the empty word where it ends before."""
    try:
        content = mapped(path)
    except OSError:
        return None
    if any(place.start + place.nbytes > len(content) for place in places):
        return ""
    return sampled(place.of(content) for place in places)


def _sent(rows: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What rank 0 has as these ``rows``, on every process. Collective: a broadcast is what all backends do fastest."""
    block = torch.empty(tuple(shape), dtype=dtype, device=device) if rows is None else rows.to(device).contiguous()
    if dist.is_initialized():
        dist.broadcast(block, src=0)
    return block


def _blocks(shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Rows that are moved at once, as (first, last + 1): a block's bytes at most, or one row. A number is one."""
    count, *inner = shape or (1,)
    step = max(1, _BLOCK // max(1, torch.Size(inner).numel() * dtype.itemsize))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _all_of(tensor: torch.Tensor) -> TensorPart:
    """The part of a process that has a tensor whole."""
    return TensorPart(tuple(tensor.shape), (_box_of(tuple(tensor.shape)),))


def _box_of(shape: tuple[int, ...]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), shape, (0,) * len(shape))


def _give_storage(root: nn.Module, place: Callable[[torch.Tensor], torch.device]) -> None:
    """Put tensors without values where each has its place instead of a meta model's; tied ones stay one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    to_empty(root, place)
    for (module, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))


def _tensors(root: CausalLM) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(), *root.named_buffers()]
