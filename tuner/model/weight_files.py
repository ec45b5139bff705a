"""Files of weights, looked at before transformers or peft opens any: no name may lead to a pickle, or elsewhere."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file  # type: ignore[attr-defined]

from tuner.config.recipe import PEFT_TYPES
from tuner.errors import DataError
from tuner.model.stored import index_names, stored_in
from tuner.model.vetting import require_own_files
from tuner.runtime.files import read_json, require_small_configs

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_EXPLICIT = "transformers_weights"
"""The key of a config by which transformers reads another file than usual."""
_CONVERT = "weights are read from safetensors files alone: convert it, or choose a model that has them"
_MEGATRON = "megatron.core"


def vet_weights(name_or_path: str, revision: str | None = None) -> set[str]:
    """Check the weights of a local directory, or of a hub model as far as they are here, by their names and headers.

    Returns the types that tensors have there, by the format's names. Raises DataError that names the file: an index
    that names anything but safetensors files of its own directory, a file with another header, an adapter next to the
    weights. What a hub model lacks here is left to the loader.
    """
    directory = Path(name_or_path)
    if directory.is_dir():
        require_own_files(directory)
    return {stored.dtype for file in weight_files(name_or_path, revision) for stored in stored_in(file).values()}


def weight_files(name_or_path: str, revision: str | None = None) -> Iterator[Path]:
    """The files in which the weights of a local directory lie, or those of a hub model that are here. DataError."""
    directory = Path(name_or_path)
    explicit = PretrainedConfig.get_config_dict(name_or_path, revision=revision)[0].get(_EXPLICIT)
    if explicit is None:
        wanted = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    elif isinstance(explicit, str) and explicit.endswith((".safetensors", ".safetensors.index.json")):
        wanted = [explicit]
    else:
        raise DataError(f"{name_or_path}/config.json: {_EXPLICIT}: {explicit!r} is no safetensors file", hint=_CONVERT)
    for name in wanted:
        found = directory / name if directory.is_dir() else _cached(name_or_path, name, revision)
        if found is not None and found.is_file():
            yield from (file for file in _files_of(found) if directory.is_dir() or file.exists())


def _files_of(found: Path) -> Iterator[Path]:
    """A file of weights, or those that an index names. DataError."""
    if found.suffix != ".json":
        yield found
        return
    for name in sorted(index_names(found)):
        yield found.parent / name


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub model in the cache; an index is fetched, since it decides what is loaded. OSError."""
    found = cached_file(
        name, file, revision=revision or "main", local_files_only=not file.endswith(".json"),
        _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def vet_adapter(directory: Path) -> None:
    """Check an adapter before peft loads it: of a kind that is trained here, in safetensors, of ranks that its weights
    have. Raises DataError."""
    require_small_configs(directory)
    config, where = read_json(directory / ADAPTER_CONFIG), directory / ADAPTER_CONFIG
    if config.get("peft_type") not in PEFT_TYPES:
        raise DataError(
            f"{where}: peft_type: {config.get('peft_type')!r}; {', '.join(PEFT_TYPES)} are loaded",
            hint="merge it into its base model with peft, and take that",
        )
    for key in ("layer_replication", "megatron_config"):
        if config.get(key):
            raise DataError(f"{where}: {key} is not taken", hint="merge it into its base model with peft")
    for key in _PATTERNS:
        if any(len(part) > _PATTERN_CHARS for part in _parts(config, key)):
            raise DataError(f"{where}: {key}: a name of more than {_PATTERN_CHARS:,} characters")
    if config.get("megatron_core", _MEGATRON) not in {_MEGATRON, None}:  # peft would import what it names
        raise DataError(f"{where}: megatron_core: {config['megatron_core']!r} is code, which is never imported")
    path = directory / ADAPTER_WEIGHTS
    if not path.is_file():
        raise DataError(f"{directory}: holds no {ADAPTER_WEIGHTS}; {_CONVERT}")
    stored = stored_in(path)
    ranks = [tensor.shape[0] for name, tensor in stored.items() if ".lora_A." in name and tensor.shape]
    ranks += [tensor.shape[1] for name, tensor in stored.items() if ".lora_embedding_B" in name and tensor.shape[1:]]
    kind = config["peft_type"]
    if kind != "LORA":
        ranks = [size for tensor in stored.values() for size in tensor.shape]
    # One for all may be more than any has, where each has its own.
    for rank in () if kind in _NO_RANK else _values(config, _RANK.get(kind, "r"), "rank_pattern", 8):
        if type(rank) is not int or rank < 1 or (ranks and rank > max(ranks)):
            raise DataError(f"{where}: a rank of {rank!r}, and the weights have ranks up to {max(ranks, default=0)}")
    for alpha in _values(config, "lora_alpha", "alpha_pattern", 8):
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise DataError(f"{where}: lora_alpha: {alpha!r} is no number")
    if not isinstance(config.get("base_model_name_or_path", ""), str | None):
        raise DataError(f"{where}: base_model_name_or_path: {config['base_model_name_or_path']!r} is no name")


_RANK, _NO_RANK = {"ADALORA": "init_r"}, ("IA3", "OFT", "BOFT", "LOKR")
"""The field with the rank where it has a name of its own, and kinds that allocate nothing by a rank."""


def _values(config: Mapping[str, Any], key: str, pattern: str, default: int) -> list[Any]:
    """What a config says for all layers, and for those that a pattern names."""
    own = config.get(pattern)
    return [config.get(key, default), *(own.values() if isinstance(own, dict) else ())]


_PATTERNS = {
    "target_modules": r"(?:%s)\Z", "exclude_modules": r"(?:%s)\Z", "rank_pattern": r"(.*\.)?(%s)$",
    "alpha_pattern": r"(.*\.)?(%s)$", "layers_pattern": r"(?:^|.*?\.)%s\.(?P<idx>\d+)\.",
    "modules_to_save": r"(^|.*\.)%s($|\..*)",
}  # fmt: skip
"""What peft matches with names of modules, by the key that has a part of it."""
_PLAIN = re.compile(r"[\w.-]*")
_PATTERN_CHARS = 1 << 16
"""To compile an expression takes a hundred times its length."""
_MATCH_S, _MATCH_MIB = 2, 512
_MATCHED = """\
import json, re, resource, sys
pattern, names, seconds, size = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (size, size))
found = re.compile(pattern)
for name in names:
    found.match(name)
"""


def _parts(config: Mapping[str, Any], key: str) -> list[str]:
    """The names, or parts of regular expressions, that a config has under a key."""
    value = config.get(key)
    listed = value if isinstance(value, list | dict) else [value]
    return [part for part in listed if isinstance(part, str)]


def vet_patterns(directory: Path, names: Iterable[str]) -> None:
    """Match an adapter's regular expressions with the names of a model's modules, in a process that can be stopped.

    Raises DataError for one that is none, or that does not end in time.
    """
    config = read_json(directory / ADAPTER_CONFIG)
    for key, form in _PATTERNS.items():
        for part in _parts(config, key):
            if _PLAIN.fullmatch(part) is None:
                given = json.dumps([form % part, list(names), _MATCH_S, _MATCH_MIB << 20])
                command = [sys.executable, "-I", "-S", "-c", _MATCHED]
                done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
                if done.returncode:
                    why = (done.stderr.splitlines() or [f"it takes more than {_MATCH_S} s of processor time"])[-1]
                    raise DataError(f"{directory / ADAPTER_CONFIG}: {key}: {part[:80]!r} cannot be matched: {why}")
