"""The files of an export: weights in shards, config, generation config, tokenizer, adapter."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tuner.errors import DataError
from tuner.export.source import MODEL_CONFIG, TOKENIZER, Source
from tuner.export.weights import TrainedModel
from tuner.model.adapter import ADAPTER, LoraSpec, saved_modules
from tuner.runtime.files import inside, json_bytes, read_json, regular_size, write_new

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
GENERATION_CONFIG = "generation_config.json"
_PEFT_PREFIX = "base_model.model."


def write_model(directory: Path, model: PreTrainedModel, shard_size: int) -> dict[str, torch.Tensor]:
    """Write sharded safetensors and config.json under the names of the architecture's published files.

    Returns what must now be on disk: file tensor name -> tensor, tied ones once.
    """
    with quiet():
        model.save_pretrained(directory, max_shard_size=shard_size)
        config = directory / "config.json"
        facts = {key: value for key, value in read_json(config).items() if key != "_name_or_path"}
        config.unlink()
        write_new(config, json_bytes(facts))
        state = model.state_dict()
        once = {name: state[name] for name, _ in model.named_parameters()}
        once |= {name: state[name] for name, _ in model.named_buffers() if name in state}
        written: dict[str, torch.Tensor] = revert_weight_conversion(model, once)
    return written


def write_adapter(
    directory: Path, trained: TrainedModel, base: tuple[str | None, str | None], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Write peft's two files; `base` is the base model's hub name and revision, each None where there is none.

    Returns what must now be on disk, by peft's names.
    """
    if trained.lora is None:
        raise DataError("the run trained no adapter")
    tensors = {
        _peft_name(name): parameter.detach().to(dtype).contiguous()
        for name, parameter in sorted(trained.model.named_parameters())
        if parameter.requires_grad
    }
    saved, twin = _saved_modules(trained.model, trained.lora)
    if twin is not None:
        tensors[_peft_name(twin[1])] = tensors[_peft_name(twin[0])].clone()
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    # peft resolved these against the model: the layers behind `all-linear` and globs, and GPT-2's transposed weights.
    injected: Any = getattr(trained.model, "peft_config", {})[ADAPTER]
    config: Any = trained.lora.peft_config(sorted(injected.target_modules), base[0])
    facts = {key: _plain(value) for key, value in config.to_dict().items()}
    facts["fan_in_fan_out"] = bool(injected.fan_in_fan_out)
    facts |= {**saved, "inference_mode": True, "revision": base[1]}
    write_new(directory / ADAPTER_CONFIG, json_bytes(facts))
    return tensors


def _peft_name(name: str) -> str:
    """The name under which peft's files hold a trained parameter: without the adapter's own name."""
    short = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return _PEFT_PREFIX + short.replace(f".{ADAPTER}.", ".")


def _saved_modules(model: PreTrainedModel, lora: LoraSpec) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """What peft's config says of modules trained in full, and the names of a trained tensor that it wants twice.

    Tied embeddings are one tensor; peft keeps them one when it is told so, but reads both names.
    """
    if not lora.modules_to_save:
        return {}, None
    names = {module: name for name, module in model.named_modules()}
    saved = set(saved_modules(model, lora))
    source, output = model.get_input_embeddings(), model.get_output_embeddings()
    if source.weight is not output.weight or not saved & {names[source], names[output]}:
        return {"modules_to_save": sorted(saved)}, None
    facts = {"modules_to_save": sorted((saved | {names[output]}) - {names[source]}), "ensure_weight_tying": True}
    return facts, (f"{names[source]}.weight", f"{names[output]}.weight")


def write_tokenizer(directory: Path, source: Source) -> None:
    """Copy the run's tokenizer files and chat template; links and local paths stay behind. Raises DataError."""
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
        facts = read_json(config)
        if facts.pop("name_or_path", None) is not None:
            config.unlink()
            write_new(config, json.dumps(facts, indent=2, ensure_ascii=False).encode())


def write_generation_config(directory: Path, source: Source, config: PretrainedConfig) -> None:
    """Write generation_config.json: the base model's, with every token that ends a turn as `eos_token_id`."""
    recorded = source.run_dir / MODEL_CONFIG / GENERATION_CONFIG
    auto: Any = GenerationConfig
    facts = read_json(recorded) if recorded.is_file() else auto.from_model_config(config).to_dict()
    ends = _ids(facts.get("eos_token_id")) + _ids(getattr(config, "eos_token_id", None)) + _tokenizer_ends(source)
    unique = list(dict.fromkeys(ends))
    if unique:
        facts["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    kept = {key: value for key, value in facts.items() if not key.startswith("_") and value is not None}
    path = directory / GENERATION_CONFIG
    path.unlink(missing_ok=True)
    write_new(path, json_bytes(kept | {"use_cache": True}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers and peft inside the block."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _tokenizer_ends(source: Source) -> list[int]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.run_dir / TOKENIZER, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source.run_dir / TOKENIZER}: transformers cannot load the tokenizer: {error}") from error
    return _ids(tokenizer.eos_token_id) + turn_ends(tokenizer)


def turn_ends(tokenizer: Any) -> list[int]:
    """Token id of the special token with which the chat template closes an assistant's turn, if it uses one."""
    if tokenizer.chat_template is None:
        return []
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        prompt = str(tokenizer.apply_chat_template(turn[:1], tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(turn, tokenize=False))
    except Exception:  # a template raises what it likes; one that refuses this turn names no end
        return []
    if not whole.startswith(prompt):
        return []
    answer = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return [i for i in answer if i in special][:1]


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else [int(value)]


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return getattr(value, "value", str(value))
