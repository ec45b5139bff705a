"""Reading the tensors of a checkpoint that was found and checked, at any number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from tuner.checkpoint.index import Index, TensorEntry
from tuner.checkpoint.manifest import PROBE_NAME
from tuner.checkpoint.open import CheckpointInfo
from tuner.checkpoint.storage import DTYPE_NAMES, read_box, read_into, tensor_bytes
from tuner.errors import DataError
from tuner.runtime.process import Collective, gloo_group
from tuner.runtime.safetensors_header import read_header

SHOWN_KEYS = 3


def load_into(
    info: CheckpointInfo, tensors: Mapping[str, torch.Tensor], prefix: str = "", exclude_prefix: str | None = None
) -> None:
    """Fill `tensors` (plain or DTensors) in place with the checkpoint's, saved at any world size; collective.

    Names, shapes and dtypes must be those of the checkpoint's tensors whose names begin with `prefix`, and not with
    `exclude_prefix`. Raises DataError with the first that differ.
    """
    index = info.index()
    excluded = () if exclude_prefix is None else (exclude_prefix,)
    selected = {
        name: entry for name, entry in index.items() if name.startswith(prefix) and not name.startswith(excluded)
    }
    require_same(info.path, selected, tensors)  # every rank has the same names and whole shapes: all raise, or none
    Collective(gloo_group()).together(lambda: read_into(info.path, index, tensors))


def require_same(path: Path, index: Index, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare names, shapes and dtypes with an index. Raises DataError with the first differing keys."""
    problems = [f"{name} is missing from it" for name in sorted(tensors.keys() - index.keys())]
    problems += [f"{name} is not expected" for name in sorted(index.keys() - tensors.keys())]
    for name in sorted(tensors.keys() & index.keys()):
        tensor, entry = tensors[name], index[name]
        if tensor.is_meta:
            raise ValueError(f"{name}: a meta tensor cannot be filled in place")
        if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            saved = f"{DTYPE_NAMES[entry.dtype]} {list(entry.shape)}"
            wanted = f"{DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))} {list(tensor.shape)}"
            problems.append(f"{name} is {saved} in it, {wanted} is wanted")
    if problems:
        more = f"; and {len(problems) - SHOWN_KEYS} more" if len(problems) > SHOWN_KEYS else ""
        raise DataError(
            f"{path} does not hold this model's state: {'; '.join(problems[:SHOWN_KEYS])}{more}",
            hint="it was saved by another model, adapter or optimizer",
        )


def read_tensors(info: CheckpointInfo, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, full CPU tensor)`, one at a time, in the order of `names` (sorted by default).

    Needs no process group. Raises DataError on a name that is not there, and naming a file that cannot be read.
    """
    index = info.index()
    for name in sorted(index) if names is None else names:
        if name not in index:
            raise DataError(f"{info.path}: holds no tensor {name!r}")
        yield name, read_tensor(info.path, index[name])


def read_probe(info: CheckpointInfo) -> dict[str, torch.Tensor]:
    """The tensors of `probe.safetensors`. Raises DataError when the checkpoint was saved without it."""
    path = info.path / PROBE_NAME
    if PROBE_NAME not in info.manifest["files"]:
        raise DataError(f"{info.path}: saved without a probe")
    read_header(path)
    try:
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: {error}") from error


def content_sha256(info: CheckpointInfo) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor, sorted by name: the same at every world size."""
    digest = hashlib.sha256()
    for name, tensor in read_tensors(info):
        digest.update(json.dumps([name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def read_tensor(directory: Path, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a checkpoint whole, put together from the chunks of all ranks. Raises DataError naming the file."""
    if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape:
        return read_box(directory, entry.dtype, entry.chunks[0], (0,) * len(entry.shape), entry.shape)
    full = torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        part = full
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        part.copy_(read_box(directory, entry.dtype, chunk, (0,) * len(chunk.sizes), chunk.sizes))
    return full
