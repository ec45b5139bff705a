"""Finding and checking checkpoints. What is newest is derived from what is valid, never stored. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.checkpoint.index import Index, read_index
from tuner.checkpoint.manifest import STATE_NAME, rank_files, read_manifest, step_dirs
from tuner.checkpoint.shard_hash import verify_shard
from tuner.errors import DataError
from tuner.runtime.files import read_json


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

    Without `shards` the tensors' bytes are checked by nobody yet: an export asks for that, and hashes them as it reads
    them; the ranks of a launch ask for it, since rank 0 has hashed all. Raises DataError naming the file.
    """
    manifest = read_manifest(path, verify)
    info = CheckpointInfo(path, int(manifest["step"]), manifest, read_json(path / STATE_NAME))
    if verify and shards:
        chunks = [chunk for entry in info.index().values() for chunk in entry.chunks]
        for name, entry in sorted(rank_files(manifest).items()):
            verify_shard(path / name, entry["sha256"], [chunk for chunk in chunks if chunk.file == name])
    return info
