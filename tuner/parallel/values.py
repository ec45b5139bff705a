"""The values of a model on its device: read from the files by each process, or sent from rank 0, in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tuner.model.root import CausalLM
from tuner.parallel.file_blocks import FileBlocks
from tuner.parallel.mapped import InFile, in_files, mapped, sampled
from tuner.runtime.parts import Box, Part, part_of
from tuner.runtime.process import Collective, gloo_group
from tuner.runtime.warned import pass_on

_BLOCK = 1 << 25
"""Bytes that are sent at once."""


def bring(root: CausalLM, device: torch.device, types: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Bring the model of one process to a device; what lies in files goes there in blocks, and never into the host's
    memory whole.

    ``types`` has those of the parameters that are to have another one there: they are cast on the device.
    """
    named = dict(_tensors(root))
    with FileBlocks(device) as blocks:
        for name, place in in_files({name: one.detach() for name, one in named.items()}).items():
            tensor = named[name]
            moved = torch.empty(tensor.shape, dtype=types.get(tensor, tensor.dtype), device=device)
            blocks.give(moved, place)
            tensor.data = moved
    root.to(device)
    for tensor, dtype in types.items():
        tensor.data = tensor.data.to(dtype)


def materialise(root: CausalLM, source: CausalLM | None, device: torch.device) -> None:
    """Give a meta model, in shards or whole, its storage and the values of rank 0's ``source``.

    What lies in files there (:mod:`tuner.parallel.mapped`) each process reads itself, its own part alone, where all of
    them have these files. The rest is sent in blocks of rows: what was drawn, quantised, fused or cast on rank 0.
    Buffers are given too: non-persistent ones (rotary frequencies) are in no file and hold garbage after meta.

    Collective; ``source`` counts on rank 0 alone. Host memory beyond the shards: a block. Raises RuntimeError where a
    tensor's type does not hold the values of the source's.
    """
    _give_storage(root, device)
    own = {} if source is None or dist.get_rank() else {name: one.detach() for name, one in _tensors(source)}
    everyone = Collective(gloo_group())
    types, places = everyone.on_rank0(lambda: ({name: one.dtype for name, one in own.items()}, in_files(own)))
    files = _readable(places, own)
    with torch.no_grad(), FileBlocks(device) as blocks:
        for name, target in _tensors(root):
            if torch.promote_types(types[name], target.dtype) != target.dtype:
                raise RuntimeError(f"{name} is {types[name]} at the source and {target.dtype} in the sharded model")
            content = files.get(places[name].path) if name in places else None
            if content is None:
                _fill(target, own.get(name), types[name])
            else:
                _read(target, places[name], content, blocks)


def _read(target: torch.Tensor, place: InFile, content: torch.Tensor, blocks: FileBlocks) -> None:
    """Give a process its part of a tensor out of a file: rows by blocks; of parts of rows no more than these."""
    local, part = _local(target)
    inner = torch.Size(target.shape[1:]).numel()
    for box in part.boxes:
        if box.sizes[1:] == tuple(target.shape[1:]):
            blocks.give(box.within(local), place, inner * (box.offsets[0] if box.offsets else 0))
        else:
            box.within(local).copy_(box.of(place.of(content)).to(local.device))


def _fill(target: torch.Tensor, whole: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Give a process its part of a tensor of this type, whose rows it is sent by who has the ``whole``. Collective."""
    local, part = _local(target)
    for start, stop in _blocks(target.shape, dtype):
        rows = None if whole is None else whole[start:stop] if whole.ndim else whole
        rows = _sent(rows, (stop - start, *target.shape[1:]) if target.ndim else (), dtype, local.device)
        for box in part.boxes:
            if (own := box.within_rows(start, stop)) is not None:
                own.within(local).copy_(own.of(rows))  # cast where it goes


def _local(target: torch.Tensor) -> tuple[torch.Tensor, Part]:
    """What a process has of a tensor, and which elements these are."""
    return (target.to_local(), part_of(target)) if isinstance(target, DTensor) else (target, _all_of(target))


def _readable(places: Mapping[str, InFile], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bytes of the files that every process has as rank 0 has them. Collective."""
    by_file: dict[str, list[str]] = {}
    for name, place in places.items():
        by_file.setdefault(place.path, []).append(name)
    everyone = Collective(gloo_group())
    samples = everyone.on_rank0(lambda: {path: sampled(own[name] for name in names) for path, names in by_file.items()})
    found: dict[str, torch.Tensor] = {}
    others: list[str] = []
    for path, names in by_file.items():
        with suppress(OSError):
            found[path] = mapped(path)
            is_long_enough = all(_end(places[name]) <= len(found[path]) for name in names)
            if not is_long_enough or sampled(places[name].of(found[path]) for name in names) != samples[path]:
                others.append(path)
    told = everyone.on_all_ranks(lambda: (set(found) - set(others), others))
    for rank, (_, different) in enumerate(told):
        if different and not everyone.rank:
            pass_on(f"rank {rank} has other weights in {different[0]}: those of rank 0 are sent")
    common = set.intersection(*(same for same, _ in told))
    return {path: content for path, content in found.items() if path in common}


def _end(place: InFile) -> int:
    return place.start + torch.Size(place.shape).numel() * place.dtype.itemsize


def _sent(rows: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What rank 0 has as these ``rows``, on every process. Collective: a broadcast is what all backends do fastest."""
    block = torch.empty(tuple(shape), dtype=dtype, device=device) if rows is None else rows.to(device).contiguous()
    dist.broadcast(block, src=0)
    return block


def _blocks(shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Rows that are moved at once, first and behind the last: a block's bytes at most, or one row. A number is one."""
    count, *inner = shape or (1,)
    step = max(1, _BLOCK // max(1, torch.Size(inner).numel() * dtype.itemsize))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _all_of(tensor: torch.Tensor) -> Part:
    """The part of a process that has a tensor whole."""
    nowhere = (0,) * tensor.ndim
    return Part(tuple(tensor.shape), (Box(nowhere, tuple(tensor.shape), nowhere),))


def _give_storage(root: nn.Module, device: torch.device) -> None:
    """Put tensors without values on a device in the place of a meta model's; tied ones stay one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    root.to_empty(device=device)
    for (module, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))


def _tensors(root: CausalLM) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(), *root.named_buffers()]
