"""The tensors of a model's published files: found by headers and hashed without being loaded, and the names that a
model's own tensors have there, found on the meta device.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tuner.errors import DataError, RecipeError
from tuner.model import transformers_private
from tuner.runtime.files import inside, read_json, reading
from tuner.runtime.safetensors_header import read_header

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_BLOCK_BYTES = 8 << 20
_BYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8) | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2) | dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
)  # fmt: skip
"""Of a number, by the format's name of its type; those of other types are not known here."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: ``size`` bytes from byte ``start`` on; ``dtype`` by the format's name."""

    file: Path
    start: int
    size: int
    dtype: str
    shape: tuple[int, ...]


def weights_directory(name_or_path: str, revision: str | None, patterns: Sequence[str] = WEIGHTS) -> Path:
    """Where the files of a local directory or of a hub model lie; of the latter those that match are fetched.

    Raises DataError where they are not available.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise DataError(f"{name_or_path}: the base model's weights are not available: {error}") from error


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a directory's safetensors files by its name, in their order; empty where there are none.

    One file of all weights is read, as by transformers, even where an index of others is next to it. Raises DataError
    for a file that is damaged or absent.
    """
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if (directory / SAFE_WEIGHTS_NAME).is_file():
        names = {SAFE_WEIGHTS_NAME}
    elif index.is_file():
        names = index_names(index)
    else:
        names = set()
    found: dict[str, Stored] = {}
    for name in sorted(names):
        found |= stored_in(directory / name)
    return found


def index_names(index: Path) -> set[str]:
    """The files that an index names. Raises DataError where one is no safetensors file of the index's directory."""
    places = read_json(index).get("weight_map")
    names = set(map(str, places.values())) if isinstance(places, Mapping) else set()
    if not names:
        raise DataError(f"{index}: its weight_map does not name files of this directory")
    for name in sorted(names):
        inside(index.parent, name)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DataError(
                f"{index}: its weight_map names {name!r}, which is no safetensors file of this directory",
                hint="weights are read from safetensors files alone: convert it, or choose a model that has them",
            )
    return names


def stored_in(path: Path) -> dict[str, Stored]:
    """Every tensor of one safetensors file by its name, in their order. Raises DataError for a damaged file."""
    header, data = read_header(path)
    try:
        found = [(name, _placed(path, data, facts)) for name, facts in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: its header cannot be read: {error}") from error
    if path.stat().st_size < max((one.start + one.size for _, one in found), default=0):
        raise DataError(f"{path}: it ends before the tensors that its header names")
    return dict(sorted(found, key=lambda item: item[1].start))


def _placed(path: Path, data: int, facts: Mapping[str, Any]) -> Stored:
    start, end = (int(offset) for offset in facts["data_offsets"])
    dtype, shape = str(facts["dtype"]), tuple(map(int, facts["shape"]))
    if not 0 <= start <= end or min(shape, default=0) < 0 or max(shape, default=0) >= 1 << 48:
        raise ValueError(f"a tensor of {list(shape)} from byte {start} to {end}")
    if math.prod(shape) * _BYTES.get(dtype, 0) not in (0, end - start):
        raise ValueError(f"{end - start:,} bytes for a tensor of {dtype} {list(shape)}")
    return Stored(path, data + start, end - start, dtype, shape)


def elements(tensors: Iterable[Stored]) -> int:
    """How many numbers all tensors hold."""
    return sum(math.prod(stored.shape) for stored in tensors)


def hashes(tensors: Mapping[str, Stored]) -> dict[str, str]:
    """Type, shape and SHA-256 of the bytes of each tensor as a line, by name, read side by side. DataError."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(_sha256, tensors.values())
        return {
            name: f"{stored.dtype} {list(stored.shape)} {digest}"
            for (name, stored), digest in zip(tensors.items(), digests, strict=True)
        }


def hash_of_all(lines: Mapping[str, str]) -> str:
    """SHA-256 over names, types, shapes and bytes, of the lines of :func:`hashes`."""
    return hashlib.sha256("\n".join(f"{name} {line}" for name, line in sorted(lines.items())).encode()).hexdigest()


def _sha256(stored: Stored) -> str:
    digest, left = hashlib.sha256(), stored.size
    with reading(stored.file), stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start)
        while left:
            if not (data := file.read(min(left, _BLOCK_BYTES))):
                raise DataError(f"{stored.file}: ends early")
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Published:
    """A tensor of the model and the tensors that stand for it in published files, name -> shape.

    ``is_itself`` where it is one tensor, only renamed; others are cut up or arranged otherwise (such as fused experts).
    """

    name: str
    targets: dict[str, tuple[int, ...]]
    is_itself: bool


def state_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and persistent buffers, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    return own | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def published(skeleton: PreTrainedModel) -> list[Published]:
    """All tensors of a model on the meta device in the order of its state, with their published names.

    Raises RecipeError where a published tensor holds several of the model's (HRM).
    """
    state = {name: tensor.detach() for name, tensor in state_names(skeleton).items()}
    whole = transformers_private.revert_weight_conversion(skeleton, dict(state))
    renamed = {id(tensor): name for name, tensor in whole.items()}
    found = []
    for name, tensor in state.items():
        if id(tensor) in renamed:
            found.append(Published(name, {renamed[id(tensor)]: tuple(tensor.shape)}, is_itself=True))
            continue
        parts = transformers_private.revert_weight_conversion(skeleton, {name: tensor})
        found.append(Published(name, {key: tuple(part.shape) for key, part in parts.items()}, is_itself=False))
    names = [key for entry in found for key in entry.targets]
    if sorted(names) != sorted(whole):
        raise RecipeError(
            f"{type(skeleton).__name__} cannot be exported: some tensors of its published files hold several of the "
            "model's each",
            hint="its checkpoints stay as they are: tuner eval and tuner generate read them",
        )
    return found


def converted(skeleton: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The published tensors of the model's tensor of this name."""
    return dict(transformers_private.revert_weight_conversion(skeleton, {name: tensor}))


def assembled(skeleton: PreTrainedModel, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's tensor of this name from its published ones, as transformers makes it when it loads them."""
    owner, _, last = name.rpartition(".")
    module = skeleton.get_submodule(owner)
    before = getattr(module, last)
    try:
        report = transformers_private.load_published(skeleton, parts, before.dtype)
        made: torch.Tensor = getattr(module, last).detach()
    finally:
        setattr(module, last, before)
    if made.is_meta or report.unexpected_keys or report.conversion_errors:
        raise RecipeError(f"{name} cannot be made of {', '.join(parts)}")
    return made.to(next(iter(parts.values())).dtype)
