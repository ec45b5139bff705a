"""Finding, checking and reading checkpoints. What is newest is derived from what is valid, never stored."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from tuner.checkpoint.index import DTYPE_NAMES, Index, TensorEntry, read_index
from tuner.checkpoint.manifest import PROBE_NAME, STATE_NAME, rank_files, read_manifest, step_dirs
from tuner.checkpoint.shard_hash import verify_shard
from tuner.checkpoint.storage import read_box, read_into, tensor_bytes
from tuner.errors import DataError
from tuner.runtime.files import read_json
from tuner.runtime.process import Collective, gloo_group
from tuner.runtime.safetensors_header import read_header

SHOWN_KEYS = 3


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint whose manifest and sizes were checked: its directory, step, manifest and `state.json`."""

    path: Path
    step: int
    manifest: dict[str, Any]
    state: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        """What the run noted about itself: recipe, model, tokenizer and data."""
        meta: dict[str, Any] = self.manifest["meta"]
        return meta

    def index(self) -> Index:
        """Where each tensor lies. Raises DataError."""
        return read_index(self.path, {name: entry["size"] for name, entry in self.manifest["files"].items()})


class CheckpointHold(ExitStack):
    """A shared `flock` on a checkpoint's directory, which keeps it from being pruned while its run continues.

    It ends with its context, when it is closed, or with its process. Raises DataError where the directory is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        self.callback(os.close, descriptor)
        with suppress(OSError):  # a file system without locks: pruning finds no lock, either
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Whether somebody on this machine, this process included, has a lock on a directory: reads it, or writes it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def newest(
    checkpoints_dir: Path, warn: Callable[[str], None] | None = None, verify: bool = True, shards: bool = True
) -> CheckpointInfo | None:
    """The valid checkpoint with the highest step; None when there is none.

    `warn` gets a line for each invalid one that is passed over. Only those tried are hashed, and none without
    `verify`; their tensors' files only with `shards`.
    """
    for _, path in step_dirs(checkpoints_dir):
        try:
            return open_checkpoint(path, verify, shards)
        except DataError as error:
            if warn is not None:
                warn(f"{path} is not used: {error.message}")
    return None


def open_checkpoint(path: Path, verify: bool = True, shards: bool = True) -> CheckpointInfo:
    """Check manifest, file set and sizes, and with `verify` every SHA-256, of tensors' files only with `shards`.

    Without `shards`, who reads a tensor holds it against the SHA-256 of its chunks. Raises DataError naming the file.
    """
    manifest = read_manifest(path, verify)
    info = CheckpointInfo(path, int(manifest["step"]), manifest, read_json(path / STATE_NAME))
    if verify and shards:
        chunks = [chunk for entry in info.index().values() for chunk in entry.chunks]
        for name, entry in sorted(rank_files(manifest).items()):
            verify_shard(path / name, entry["sha256"], [chunk for chunk in chunks if chunk.file == name])
    return info


def require_same_base(info: CheckpointInfo, frozen_hash: str | None) -> None:
    """Check that the weights that were not trained are still those of the checkpoint's run. Raises DataError."""
    noted = info.meta.get("frozen_hash")
    if noted != frozen_hash:
        raise DataError(
            f"{info.path}: the base model changed since this checkpoint was saved ({noted} -> {frozen_hash})",
            hint="restore it, or name its commit: model.revision",
        )


def require_same_quantizer(info: CheckpointInfo, quantizer: Mapping[str, Any] | None) -> None:
    """Check that what made codes of the base is what did so in the checkpoint's run. Raises DataError."""
    noted = info.meta.get("quantizer")
    if noted != quantizer:
        raise DataError(
            f"{info.path}: the base was quantised otherwise when this checkpoint was saved ({noted} -> {quantizer})",
            hint="take the version of tuner that saved it, or start a new run with --name",
        )


def load_into(
    info: CheckpointInfo, tensors: Mapping[str, torch.Tensor], prefix: str = "", without: str | None = None
) -> None:
    """Fill `tensors` (plain or DTensors) in place with the checkpoint's, saved at any world size; collective.

    Names, shapes and dtypes must be those of the checkpoint's tensors whose names begin with `prefix`, and not with
    `without`. Raises DataError with the first that differ.
    """
    index = info.index()
    left = () if without is None else (without,)
    meant = {name: entry for name, entry in index.items() if name.startswith(prefix) and not name.startswith(left)}
    require_same(info.path, meant, tensors)
    Collective(gloo_group()).on_all_ranks(lambda: read_into(info.path, index, tensors))


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
