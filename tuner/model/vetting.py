"""What a model's files may say and hold, looked at before transformers or peft opens any; and the licence on its card.

A config may ask neither for code from elsewhere nor for weights that are no plain numbers, and no name in a file may
lead to a pickle, or elsewhere.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file  # type: ignore[attr-defined]

from tuner.config.recipe import PEFT_TYPES
from tuner.errors import DataError, RecipeError
from tuner.model.stored import index_names, stored_in
from tuner.runtime.files import inside, read_json, require_small_configs
from tuner.runtime.warned import pass_on

if TYPE_CHECKING:
    from tuner.model.quantize.codes import Kind


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
            named = sorted(index_names(found)) if found.suffix == ".json" else [found.name]
            files = (found.parent / each for each in named)
            yield from (file for file in files if directory.is_dir() or file.exists())


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


_OF_KERNELS = ("attn_implementation", "experts_implementation")
KERNELS = frozenset({"kernel_config"}.union(*({one, f"_{one}", f"_{one}_internal"} for one in _OF_KERNELS)))
"""Keys by which transformers fetches compiled code from the hub where their value is a repository."""
ROUTER_LOSSES = ("output_router_logits", "router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Keys that ask for, or weigh, the term which transformers adds to the loss of a mixture of experts."""
QUANTIZATION = "quantization_config"
CARD = "README.md"
MAX_LICENCE_CHARACTERS = 100
DTYPES = frozenset({"dtype", "torch_dtype"})


def vet_config(name_or_path: str, revision: str | None = None, quantize: "Kind | None" = None) -> None:
    """Read a model's config.json and refuse it where it names code on the hub, needs code of its own or is quantised.

    An `auto_map` next to a type that transformers knows is no reason: its own class is used. Nor are weights that
    bitsandbytes stored as the codes which are wanted (``quantize``). Raises DataError with the key, RecipeError for
    weights that are quantised otherwise, and what transformers raises where there is no such config.
    """
    require_small_configs(Path(name_or_path))
    config, _ = PretrainedConfig.get_config_dict(name_or_path, revision=revision)
    where = f"{name_or_path}/config.json"
    if quantize is not None and config.get(QUANTIZATION) is not None:
        _require_codes(where, config, quantize)
        config = {key: value for key, value in config.items() if key != QUANTIZATION}
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise DataError(
            f"{where}: auto_map: model_type {config.get('model_type')!r} needs code of its own, which is never run",
            hint="choose a model that transformers knows by itself",
        )
    for key, value in _entries(config):
        _refuse(where, key, value)


def holds_codes(name_or_path: str, revision: str | None) -> bool:
    """Whether a model's files hold codes in the place of weights."""
    return PretrainedConfig.get_config_dict(name_or_path, revision=revision)[0].get(QUANTIZATION) is not None


def _require_codes(where: str, config: Mapping[str, Any], wanted: "Kind") -> None:
    """Raise RecipeError for files whose weights are quantised otherwise than is wanted."""
    from tuner.model.quantize.published import published_kind

    if (found := published_kind(config, where)) not in {None, wanted}:
        raise RecipeError(
            f"model.quantize: {wanted}, but the weights of {where} are published as {found}",
            hint=f"write model.quantize: {found}",
        )


def ignored_code(config: PretrainedConfig) -> str | None:
    """A sentence on the code that a config names and that nobody runs; None where it names none."""
    if not getattr(config, "auto_map", None):
        return None
    return f"auto_map in config.json is ignored: transformers' own {config.model_type} is used, and no other code"


def weighs_routers(config: PretrainedConfig) -> bool:
    """Whether a config says anything of a term that its class may add to the loss of a mixture of experts."""
    text = config.get_text_config()
    parts = (config, text, getattr(text, "ffn_config", None))
    return any(getattr(part, key, None) for part in parts for key in ROUTER_LOSSES)


def layers_with_indexers(config: PretrainedConfig) -> list[str]:
    """The kinds of a model's layers in which an indexer chooses what each token sees (DeepSeek V3.2 and its kin)."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds & {"indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"})


def untrained_indexer(config: PretrainedConfig) -> str | None:
    """A sentence on the indexers of a model, which learn nothing; None where it has none."""
    if not (kinds := layers_with_indexers(config)):
        return None
    return (
        f"the indexer of its layers ({', '.join(kinds)}) chooses by rank which tokens each one sees: that gives it no "
        "gradient, and transformers has no loss for it, so its weights stay as they are"
    )


def asks_router_logits(config: PretrainedConfig) -> bool:
    """Whether a config has its model give the logits of its routers, and so add the term that its class may have."""
    return any(getattr(part, "output_router_logits", False) for part in (config, config.get_text_config()))


def require_known_losses(config: PretrainedConfig) -> None:
    """Raise RecipeError for a config that weighs the z-loss of the output layer, which its class would add."""
    if weight := getattr(config.get_text_config(), "z_loss_coefficient", None):
        raise RecipeError(
            f"model: z_loss_coefficient: {weight:g} of the model's config weighs a loss that is not computed",
            hint="write model.config.z_loss_coefficient: 0",
        )


def licence_of(name_or_path: str, revision: str | None) -> str | None:
    """The `license` (for `other`, the `license_name`) in the front matter of the model's card; None where unknown."""
    path = Path(name_or_path) / CARD
    # Of a hub that cannot be reached, of a card that is no text and of one that is not YAML the licence is unknown.
    with suppress(OSError, ValueError, YAMLError, RecursionError):
        if not Path(name_or_path).is_dir():
            path = Path(hf_hub_download(name_or_path, CARD, revision=revision))
        before, front, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        facts: Any = None if before.strip() else YAML(typ="safe", pure=True).load(front)
        if isinstance(facts, dict):
            licence = facts.get("license_name") if facts.get("license") == "other" else facts.get("license")
            if isinstance(licence, str) and len(licence) <= MAX_LICENCE_CHARACTERS and licence.isprintable():
                return licence
    return None


def require_own_files(directory: Path) -> None:
    """Check that a local directory's weights are its own files. Raises DataError naming what leads elsewhere."""
    if (directory / "adapter_config.json").is_file():  # transformers would load the model that it names instead
        raise DataError(
            f"{directory / 'adapter_config.json'}: an adapter for another model is next to the weights",
            hint="take it away, or merge the adapter into its model: tuner export-hf",
        )
    if all((directory / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        others = read_json(directory / SAFE_WEIGHTS_INDEX_NAME).get("weight_map")
        if not isinstance(others, dict) or set(others.values()) != {SAFE_WEIGHTS_NAME}:
            pass_on(
                f"{directory}: holds two sets of weights: {SAFE_WEIGHTS_NAME} is read, as by transformers, and not the "
                f"files that {SAFE_WEIGHTS_INDEX_NAME} names; remove the one that is stale"
            )
    for path in sorted(directory.glob("*.index.json")) if directory.is_dir() else ():
        names = read_json(path).get("weight_map")
        for name in sorted(set(names.values()), key=str) if isinstance(names, dict) else ():
            try:
                inside(directory, str(name))
            except DataError as error:
                raise DataError(f"{path}: {error.message}") from error


def broken_weights(directory: Path) -> str:
    """The first weights file of a directory that is not one."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return path.name
    return "its weights"


def _refuse(where: str, key: str, value: Any) -> None:
    if key in KERNELS:
        names = [text for text in _texts(value) if "/" in text]
        if names:
            raise DataError(
                f"{where}: {key}: {names[0]!r} is code on the hub, which is never fetched",
                hint=f"take {key} out of the file: it changes no weight",
            )
    elif key == QUANTIZATION and value is not None:
        raise DataError(
            f"{where}: {key}: the weights are quantised, and would not be loaded as they are",
            hint="choose the same model in bfloat16 or float32; what bitsandbytes stored as nf4 or int8 is a base for "
            "an adapter: model.quantize: nf4 or int8",
        )
    elif key in DTYPES:
        for text in _texts(value):
            if text != "auto" and not isinstance(getattr(torch, text.removeprefix("torch."), None), torch.dtype):
                raise DataError(f"{where}: {key}: {text!r} is no type of weights", hint="write bfloat16 or float32")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value, of configs inside the config too."""
    waiting = [config]
    while waiting:
        for key, value in waiting.pop().items():
            yield key, value
            if isinstance(value, Mapping) and key not in KERNELS:
                waiting.append(value)


def _texts(value: Any) -> list[str]:
    """The strings in a value that may be a mapping of them."""
    waiting, found = [value], []
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return found
