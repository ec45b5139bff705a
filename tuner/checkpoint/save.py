"""Saving: write to a temporary directory, agree, describe, rename. The rename is the commit; before it nothing looks
saved. Old checkpoints are pruned after it, by ``rundir/checkpoints.prune``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tuner.checkpoint.manifest import (
    INDEX_NAME,
    MANIFEST_SCHEMA,
    PROBE_NAME,
    STATE_NAME,
    sealed,
    step_name,
)
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.staging import Staged
from tuner.checkpoint.storage import WrittenFile, write_shards
from tuner.errors import DataError, MachineError, TunerError
from tuner.runtime.files import (
    MANIFEST_NAME,
    TMP_PREFIX,
    discard_dir,
    free_bytes,
    fsync_dir,
    json_bytes,
    machine_error,
    publish_dir,
    regular_size,
    replace_dir,
    set_aside,
    sha256_file,
    write_new,
)
from tuner.runtime.process import Collective, gloo_group

SLACK_BYTES = 1 << 20
"""Room for headers, index and manifest besides the tensors."""


WriteShards = Callable[[Path, Mapping[str, torch.Tensor], Staged | None, Collective], list[WrittenFile]]
"""Such as `write_shards`: afterwards every rank's file lies in the directory as rank 0 sees it."""


@dataclass(frozen=True)
class CheckpointDir:
    """Where a run's checkpoints go: the `checkpoints` directory, and the id that marks its unfinished ones."""

    path: Path
    run_id: str
    write: WriteShards = write_shards


def save(  # noqa: PLR0913 - the parts of a checkpoint
    run: CheckpointDir,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    probe: Mapping[str, torch.Tensor] | None = None,
    *,
    staged: Staged | None = None,
    ranks: Collective | None = None,
) -> Path:
    """Commit `tensors` (plain or DTensors, the same names on every rank) as `step-N`; returns its path.

    Collective over all ranks of the process group, or over `ranks`, whose group is then this call's own; without a
    group, the only process saves. Where a valid `step-N` has the same state, and a probe if one is given, nothing is
    written; otherwise the new one takes its place. `state`, `meta` and `probe` are rank 0's. With
    `staged` the bytes are taken from there, and `tensors` say only how they lie. When any rank fails, every rank
    raises: MachineError for the disk, with the path and the bytes needed; earlier checkpoints are untouched.
    """
    _refuse_others(tensors)  # the same names on every rank: all raise, or none
    ranks = ranks or Collective(gloo_group())
    final = run.path / step_name(step)
    tmp = run.path / f"{TMP_PREFIX}{final.name}-{run.run_id}"
    # What rank 0 does alone gives its result, or its error, to every rank: none continues where another has failed.
    if ranks.on_rank0(lambda: _is_saved(final, run.run_id, state, probe)):
        return final
    ranks.on_rank0(lambda: _begin(final, tmp, tensors))
    try:
        shards = run.write(tmp, tensors, staged, ranks)
        manifest = {"schema": MANIFEST_SCHEMA, "step": step, "world_size": ranks.size, "meta": dict(meta)}
        # Every rank's files are on the disk (`run.write` ends with an exchange): now they may become a checkpoint.
        ranks.on_rank0(lambda: _commit(tmp, final, shards, manifest, state, probe))
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(TunerError):
                discard_dir(tmp)
        raise
    return final


def require_room(checkpoints_dir: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise MachineError, with the bytes needed and free, where no checkpoint of these tensors fits on the disk."""
    needed, free = _total_bytes(tensors) + SLACK_BYTES, free_bytes(checkpoints_dir)
    if free < needed:
        raise MachineError(
            f"{checkpoints_dir}: no room for a checkpoint (needed {needed:,} bytes, free {free:,} bytes)",
            hint="free disk space, lower checkpoint.keep, or choose another output directory",
        )


def _refuse_others(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: only tensors can be saved, got {type(tensor).__name__}")


def _is_saved(final: Path, run_id: str, state: Mapping[str, Any], probe: Mapping[str, torch.Tensor] | None) -> bool:
    """Whether the step is saved already, with this state and a probe where there is one. Sets an invalid one aside."""
    if not os.path.lexists(final):
        return False
    try:
        there = open_checkpoint(final)
    except DataError:
        set_aside(final, run_id)
        return False
    is_probed = probe is None or PROBE_NAME in there.manifest["files"]
    return is_probed and there.state == json.loads(json_bytes(dict(state)))


def _begin(final: Path, tmp: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the fresh directory."""
    needed = _total_bytes(tensors)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        fsync_dir(final.parent.parent)  # or a crash may take the new directory away with all checkpoints in it
    except OSError as error:
        raise machine_error(final.parent, error, needed) from error
    discard_dir(tmp)
    require_room(final.parent, tensors)
    try:
        tmp.mkdir()
    except OSError as error:
        raise machine_error(tmp, error, needed) from error


def _commit(
    tmp: Path,
    final: Path,
    shards: list[WrittenFile],
    manifest: dict[str, Any],
    state: Mapping[str, Any],
    probe: Mapping[str, torch.Tensor] | None,
) -> None:
    files: dict[str, dict[str, Any]] = {}
    for shard in shards:
        size = regular_size(tmp / shard.name)
        if size != shard.size:
            raise MachineError(f"{tmp / shard.name}: {size:,} bytes on disk, {shard.size:,} were written")
        files[shard.name] = {"size": shard.size, "sha256": shard.sha256}
    files[INDEX_NAME] = {"size": regular_size(tmp / INDEX_NAME), "sha256": sha256_file(tmp / INDEX_NAME)}
    small = {STATE_NAME: json_bytes(dict(state))}
    if probe is not None:
        small[PROBE_NAME] = safetensors.torch.save({name: value.cpu().contiguous() for name, value in probe.items()})
    for name, data in small.items():
        write_new(tmp / name, data)
        files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    # Last of all files: a directory with a manifest has everything that the manifest names.
    write_new(tmp / MANIFEST_NAME, json_bytes(sealed({**manifest, "files": files})))
    if os.path.lexists(final):
        replace_dir(tmp, final)
    else:
        publish_dir(tmp, final)


def _total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors in full, however many ranks share them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
