"""The base model's weights where they lie: its published safetensors files, located and never loaded whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tuner.checkpoint.index import DTYPES
from tuner.errors import DataError
from tuner.export.shards import INDEX, WEIGHTS
from tuner.export.tensors import OpenFiles, TensorSource, file_tensor
from tuner.runtime.files import read_json

_HEADER_LIMIT = 100_000_000


def published_tensors(files: OpenFiles, name_or_path: str, revision: str | None) -> dict[str, TensorSource]:
    """Every tensor of a local directory's or a hub model's safetensors files, by its name there.

    Empty where the model has no such files. Raises DataError for a file that is damaged or absent.
    """
    directory = _directory(name_or_path, revision)
    index = directory / INDEX
    if index.is_file():
        places = read_json(index).get("weight_map")
        names = set(places.values()) if isinstance(places, Mapping) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise DataError(f"{index}: its weight_map does not name files of this directory")
    else:
        names = {WEIGHTS} if (directory / WEIGHTS).is_file() else set()
    found: dict[str, TensorSource] = {}
    for name in sorted(names):
        found |= _tensors(files, directory / name)
    return found


def _directory(name_or_path: str, revision: str | None) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    wanted = ["*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise DataError(f"{name_or_path}: the base model's weights cannot be had: {error}") from error


def _tensors(files: OpenFiles, path: Path) -> dict[str, TensorSource]:
    length = int.from_bytes(bytes(files.read(path, 0, 8).tolist()), "little")
    if length > _HEADER_LIMIT:
        raise DataError(f"{path}: not a safetensors file")
    try:
        fields: Any = json.loads(files.read(path, 8, length).numpy().tobytes())
        return {
            name: _placed(files, path, 8 + length, facts) for name, facts in fields.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: its header cannot be read: {error}") from error


def _placed(files: OpenFiles, path: Path, data: int, facts: Mapping[str, Any]) -> TensorSource:
    dtype, shape = DTYPES[facts["dtype"]], tuple(int(size) for size in facts["shape"])
    start, end = (int(offset) for offset in facts["data_offsets"])
    if end - start != math.prod(shape) * dtype.itemsize or start < 0:
        raise ValueError(f"a tensor of shape {list(shape)} has {end - start} bytes")
    return file_tensor(files, path, data + start, shape, dtype)
