"""What a checkpoint is called and says of itself in `manifest.json`, and the check of its files. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import DataError
from tuner.runtime.files import MANIFEST_NAME, json_bytes, read_json, verify_entries

MANIFEST_SCHEMA = 3
INDEX_NAME = "index.json"
STATE_NAME = "state.json"
PROBE_NAME = "probe.safetensors"
SEAL = "manifest_sha256"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})", flags=re.ASCII)


def step_name(step: int) -> str:
    """The directory of a step: `step-120`."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    return f"step-{step}"


def step_dirs(checkpoints_dir: Path) -> list[tuple[int, Path]]:
    """All `step-N` directories, valid or not, newest first; links and other names are passed over."""
    if not checkpoints_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in checkpoints_dir.iterdir()
        if (match := STEP.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, reverse=True)


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank: `rank-0000-of-0002.safetensors`."""
    return f"rank-{rank:04d}-of-{world_size:04d}.safetensors"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as it reads back from JSON, with the SHA-256 of all its other fields in `manifest_sha256`."""
    body: dict[str, Any] = json.loads(json_bytes({key: value for key, value in manifest.items() if key != SEAL}))
    return {**body, SEAL: hashlib.sha256(json_bytes(body)).hexdigest()}


def read_manifest(path: Path, verify: bool) -> dict[str, Any]:
    """The manifest of the checkpoint in directory `path`, after checking the set of files and their sizes.

    With `verify` every file but those of the ranks is held against its SHA-256; these hold the tensors and are left to
    `open_checkpoint`. Raises DataError naming the file.
    """
    manifest_path = path / MANIFEST_NAME
    if not path.is_dir():
        raise DataError(f"{path}: no such directory")
    manifest = read_json(manifest_path)
    if manifest.get("schema") != MANIFEST_SCHEMA:
        raise DataError(
            f"{manifest_path}: schema {manifest.get('schema')!r}, this version reads {MANIFEST_SCHEMA}",
            hint="resume with the version of tuner that saved it (run.json names it), or start a new run",
        )
    body = {key: value for key, value in manifest.items() if key != SEAL}
    if manifest.get(SEAL) != hashlib.sha256(json_bytes(body)).hexdigest():
        raise DataError(f"{manifest_path}: its SHA-256 of itself differs")
    step, world_size, files = manifest.get("step"), manifest.get("world_size"), manifest.get("files")
    if type(step) is not int or type(world_size) is not int or not isinstance(files, dict):
        raise DataError(f"{manifest_path}: step, world_size or files is missing or of the wrong type")
    if not isinstance(manifest.get("meta"), dict):
        raise DataError(f"{manifest_path}: meta is missing")
    if (match := STEP.fullmatch(path.name)) and int(match[1]) != step:
        raise DataError(f"{manifest_path}: belongs to step {step}, not to {path.name}")
    of_ranks = rank_files(manifest)
    expected = {shard_name(rank, world_size) for rank in range(min(world_size, len(files)))}
    if world_size < 1 or of_ranks.keys() != expected:
        raise DataError(f"{manifest_path}: its files are not those of {world_size} ranks")
    for name in (INDEX_NAME, STATE_NAME):
        if name not in files:
            raise DataError(f"{manifest_path}: {name} is not listed")
    verify_entries(path, {name: entry for name, entry in files.items() if name not in of_ranks}, hash=verify)
    verify_entries(path, of_ranks, hash=False)
    return manifest


def rank_files(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the files that hold the tensors, one of each rank."""
    return {name: entry for name, entry in manifest["files"].items() if name.startswith("rank-")}
