"""The files of an export besides its weights: config, generation config, tokenizer, the adapter's config."""

import contextlib
import copy
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from tuner.data.encoding.template import LoadedTemplates, unless_refused
from tuner.errors import DataError, RecipeError, first_line
from tuner.export.source import ExportSource
from tuner.model.adapter import ADAPTER, LoraSpec, lora_layers, saved_modules, taken_for_experts
from tuner.model.build import has_score, is_part, without_progress
from tuner.model.experts import LORA_A, LORA_B, adapted_experts, adapted_weights
from tuner.model.peft_kinds import PeftSpec
from tuner.model.tokens import trainable_tokens
from tuner.rundir.layout import MODEL_CONFIG, TOKENIZER
from tuner.runtime.files import inside, json_bytes, read_json, regular_size, write_new
from tuner.runtime.turn_end import ChatConvention, turn_end

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GENERATION_CONFIG = "generation_config.json"
_PEFT_PREFIX = "base_model.model."


def write_config(directory: Path, config: PretrainedConfig, architecture: str, dtype: torch.dtype) -> None:
    """Write config.json as transformers does for a model of this class and type, without local paths."""
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [architecture], dtype
    config.save_pretrained(directory)
    path = directory / CONFIG
    # The code that an auto_map leads to is not in the directory, and was not used.
    facts = {key: value for key, value in read_json(path).items() if key not in ("_name_or_path", "auto_map")}
    facts |= _rope_for_older_readers(facts)
    path.unlink()
    write_new(path, json_bytes(facts))


def _rope_for_older_readers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions as transformers 4, and servers built on it, read them: without this they take theta for 10000.

    transformers 5 reads both forms alike.
    """
    rope = facts.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope or "rope_theta" in facts:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {"rope_theta": rope["rope_theta"], **({"rope_scaling": scaling} if is_scaled else {})}


def write_adapter_config(
    directory: Path, adapted: PreTrainedModel, spec: LoraSpec | PeftSpec, base: tuple[str | None, str | None]
) -> None:
    """Write peft's config; ``base`` is the base model's hub name and revision, each None where there is none."""
    if isinstance(spec, LoraSpec):
        facts = _facts_of_lora(adapted, spec, base[0])
    else:
        facts = _facts_of_peft(adapted, spec, base[0])
    trained = _saved_modules(adapted, spec.modules_to_save) | _new_tokens(adapted)
    if lacking := sorted(trained.keys() - facts.keys()):
        kind = facts["peft_type"]
        raise RecipeError(f"peft has no {lacking[0]} with {kind}: all that was trained is in a merged export alone")
    facts |= {**trained, "inference_mode": True, "revision": base[1]}
    write_new(directory / ADAPTER_CONFIG, json_bytes(facts))


def _facts_of_peft(adapted: PreTrainedModel, spec: PeftSpec, base: str | None) -> dict[str, Any]:
    """The config as it was given, and where peft has a default of the model's type, what that is."""
    config, resolved = spec.peft_config(has_score(adapted), base), getattr(adapted, "peft_config", {})[ADAPTER]
    config.target_modules = resolved.target_modules
    if hasattr(config, "save_projection"):  # VeRA's matrices are drawn again by the key that the config has
        config.save_projection = False
    return dict(json.loads(json.dumps(config.to_dict(), default=_plain)))


def _facts_of_lora(adapted: PreTrainedModel, lora: LoraSpec, base: str | None) -> dict[str, Any]:
    # peft resolved these against the model: the layers that `all-linear` and globs name, GPT-2's transposed weights.
    injected: Any = getattr(adapted, "peft_config", {})[ADAPTER]
    by_weight = taken_for_experts(adapted, [name for name, _ in lora_layers(adapted)])
    last_names = {name.rpartition(".")[2] for name in by_weight}
    # Of a part in full, or peft would find layers of the other parts of the whole model too.
    targets = [name for name, _ in lora_layers(adapted)] if is_part(adapted) else sorted(injected.target_modules)
    by_name = [target for target in targets if target.rpartition(".")[2] not in last_names]
    config: Any = lora.peft_config(by_name, has_score(adapted), base)
    facts: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_plain))
    if by_weight:
        facts |= _by_weight(by_weight, lora)
    if lora.experts:
        weights = [f"{name}.{each}" for name, one in adapted_experts(adapted).items() for each in adapted_weights(one)]
        facts |= {"target_parameters": [*(facts.get("target_parameters") or ()), *weights], "lora_dropout": 0.0}
    return facts | {"fan_in_fan_out": bool(injected.fan_in_fan_out)}


def _by_weight(names: Sequence[str], lora: LoraSpec) -> dict[str, Any]:
    """What peft's config says of layers that it would not find by name: which weights are adapted. Raises RecipeError.

    Over a weight peft has no dropout, of which a loaded adapter makes no use.
    """
    if lora.use_dora:
        raise RecipeError(
            f"{names[0]}: peft takes its name for a routed expert's, and has no DoRA for a weight that is named itself",
            hint="export with --adapter merge",
        )
    return {"target_parameters": [f"{name}.weight" for name in names], "lora_dropout": 0.0}


def peft_name(name: str) -> str:
    """The name under which peft's files hold a trained parameter: without the adapter's own name."""
    short = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    short = re.sub(r"\.new_rows$", ".token_adapter.trainable_tokens_delta", short)
    return _PEFT_PREFIX + re.sub(rf"\.{ADAPTER}(?=\.|$)", "", short)


def expert_names(model: PreTrainedModel) -> dict[str, str]:
    """What peft calls the adapters of routed experts, by our names.

    It wraps the module of a layer's experts once for each weight, in their order: the last wrapper is the outermost.
    """
    found = {}
    for name, module in adapted_experts(model).items():
        for depth, weight in enumerate(reversed(adapted_weights(module))):
            wrapper = name + ".base_layer" * depth
            found[f"{name}.{weight}{LORA_A}"] = f"{wrapper}.lora_A.weight"
            found[f"{name}.{weight}{LORA_B}"] = f"{wrapper}.lora_B.weight"
    return found


def _new_tokens(model: PreTrainedModel) -> dict[str, Any]:
    """What peft's config says of rows that are trained alone; it finds tied layers itself. Raises RecipeError."""
    layers, seen, found = trainable_tokens(model), set[int](), {}
    for name, layer in layers.items():
        if layer.bias is not None:
            raise RecipeError(f"{name}: peft leaves out the bias of a layer with new tokens", hint="--adapter merge")
        if id(layer.new_rows) not in seen:
            found[name] = list(range(layer.first, layer.first + len(layer.new_rows)))
        seen.add(id(layer.new_rows))
    return {"trainable_token_indices": found} if found else {}


def _saved_modules(model: PreTrainedModel, patterns: Sequence[str]) -> dict[str, Any]:
    """What peft's config says of modules trained in full; tied ones stay one tensor where it is asked to."""
    saved, tied = set(saved_modules(model, patterns)), tied_and_saved(model, patterns)
    if not saved:
        return {}
    if tied is None:
        return {"modules_to_save": sorted(saved)}
    return {"modules_to_save": sorted((saved | {tied[1]}) - {tied[0]}), "ensure_weight_tying": True}


def tied_and_saved(model: PreTrainedModel, patterns: Sequence[str]) -> tuple[str, str] | None:
    """Names of the input and the output embeddings where they are one tensor that is trained in full.

    peft wants that twice, and reads both names.
    """
    if not patterns or has_score(model):
        return None
    names = {module: name for name, module in model.named_modules()}
    source, output = model.get_input_embeddings(), model.get_output_embeddings()
    if source.weight is not output.weight or not set(saved_modules(model, patterns)) & {names[source], names[output]}:
        return None
    return names[source], names[output]


def write_tokenizer(directory: Path, source: ExportSource) -> None:
    """Copy the run's tokenizer files and chat template; links and local paths are not copied. Raises DataError."""
    tokenizer = source.run_dir / TOKENIZER
    if not tokenizer.is_dir():
        raise DataError(f"{tokenizer}: no such directory: the run's tokenizer is missing")
    for path in sorted(tokenizer.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        regular_size(path)
        target = inside(directory, path.relative_to(tokenizer).as_posix())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target, follow_symlinks=False)
    config = directory / "tokenizer_config.json"
    if config.is_file():
        before = read_json(config)
        facts = {key: value for key, value in before.items() if key != "name_or_path"}
        if facts.get("tokenizer_class") == "TokenizersBackend":  # as transformers 4, and servers built on it, call it
            facts["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(facts.get("extra_special_tokens"), list):
            facts["additional_special_tokens"] = facts.pop("extra_special_tokens")
        if facts != before:
            config.unlink()
            write_new(config, json.dumps(facts, indent=2, ensure_ascii=False).encode())


def write_generation_config(directory: Path, source: ExportSource, config: PretrainedConfig) -> None:
    """Write generation_config.json: the base model's, with every token that ends a turn as `eos_token_id`."""
    auto: Any = GenerationConfig
    facts = generation_in(source.run_dir / MODEL_CONFIG) or auto.from_model_config(config).to_dict()
    known = facts.get("eos_token_id"), getattr(config, "eos_token_id", None)
    if ends := ends_of(load_tokenizer(source.run_dir / TOKENIZER), *known):
        facts["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    kept = {key: value for key, value in facts.items() if not key.startswith("_") and value is not None}
    path = directory / GENERATION_CONFIG
    path.unlink(missing_ok=True)
    write_new(path, json_bytes(kept | {"use_cache": True}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers and peft inside the block."""
    with without_progress(reports=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory as transformers has it. Raises DataError."""
    auto: Any = AutoTokenizer
    try:
        return auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        why = first_line(error) if (directory / "tokenizer.json").is_file() else "it has no tokenizer.json"
        raise DataError(f"{directory}: transformers cannot load the tokenizer: {why}") from error


def generation_in(directory: Path) -> dict[str, Any]:
    """What generation_config.json says in a directory; empty where it has none. Raises DataError."""
    path = directory / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def ends_of(tokenizer: Any, *of_configs: Any) -> list[int]:
    """Ids at which generation stops: what configs say of it, the tokenizer's own, and what closes a turn."""
    known = list[int]()
    for value in (*of_configs, tokenizer.eos_token_id):
        known += value if isinstance(value, (list, tuple)) else [] if value is None else [int(value)]
    return list(dict.fromkeys(known + turn_ends(tokenizer, known)))


def turn_ends(tokenizer: Any, known: Sequence[int] = ()) -> list[int]:
    """Token id with which the chat template closes an assistant's turn, where generation stops at none of it yet.

    It stops at the tokenizer's own end token and at the ids that are `known`. Raises DataError for a template that goes
    beyond its limits, or does not compile.
    """
    if tokenizer.chat_template is None:
        return []
    templates = LoadedTemplates(tokenizer)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = (special | {*tokenizer.all_special_tokens}) - {tokenizer.unk_token}
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    ends = {*tokenizer.convert_ids_to_tokens(list(known)), tokenizer.eos_token}

    def specials(text: str) -> list[tuple[int, int]]:
        return [found.span() for found in pattern.finditer(text)]

    end = turn_end(ChatConvention(partial(unless_refused, templates.render), specials, ends, tokenizer.bos_token))
    return [] if end is None else [int(tokenizer.convert_tokens_to_ids(end))]


def _plain(value: Any) -> Any:
    """What JSON has no word for, of peft's config."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
