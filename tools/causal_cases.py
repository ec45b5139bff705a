"""A tiny config of every causal type that transformers knows: its own defaults with the sizes made small."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from tools.tables import beside

VOCAB = 97
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_TABLE = beside(__file__)
_SIZES: dict[str, Any] = _TABLE["sizes"]
"""By the name of the key, where a config has it."""
_LAYERS: int = _SIZES["num_hidden_layers"]
_OVERRIDES: dict[str, dict[str, Any]] = _TABLE["overrides"]
FAMILIES: tuple[str, ...] = tuple(_TABLE["families"])
"""One type of each family that people train, for what is too long for all of them."""
DECODERS: tuple[str, ...] = tuple(_TABLE["decoders"])
"""Encoders as their config comes, which `is_decoder: true` makes causal."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of the type of a few ten thousand parameters, without dropout.

    Raises what its class raises where transformers itself cannot make one.
    """
    return CONFIG_MAPPING[model_type](**_small(CONFIG_MAPPING[model_type]))


def decoder_config(model_type: str) -> PretrainedConfig:
    """A config of an encoder that makes it a decoder."""
    config = tiny_config(model_type)
    config.is_decoder = True
    return config


def write_random(config: PretrainedConfig, directory: Path) -> None:
    """Save a model of the config as transformers saves it, with weights of which each matters, sinks and biases too.

    Raises what its class raises, and ValueError where a row of ids gives no finite logits for each.
    """
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and "conv" not in name:
                _draw(name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn(buffer.shape) * 0.1)
        ids = torch.arange(3, 24)[None] % VOCAB
        logits = model(input_ids=ids, use_cache=False).logits
        if logits.shape[:2] != ids.shape or not logits.isfinite().all():
            raise ValueError(f"logits {list(logits.shape)} of {ids.shape[1]} tokens, or not finite")
    model.save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)  # as it was given: a part of it may be what the model keeps


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Matrices, those of experts too, large enough for attention to matter; all else away from its zeros and ones."""
    drawn = torch.randn(parameter.shape)
    if parameter.ndim > 1:
        parameter.copy_(drawn * min(0.2, parameter.shape[-1] ** -0.5))
    elif name.endswith("sinks"):
        parameter.copy_(drawn)
    else:
        parameter.add_(drawn * 0.1)


def _small(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """The keys of a config class with small values; configs inside it likewise."""
    try:
        defaults = kind().to_dict()
    except (ValueError, StrictDataclassError):  # some defaults do not pass their own validation
        defaults = {}
    made = {key: value for key, value in _SIZES.items() if key in defaults or key in kind.attribute_map}
    made |= {key: 0.0 for key, value in defaults.items() if "drop" in key and isinstance(value, float)}
    made |= {key: {} for key, value in defaults.items() if key == "per_layer_config" and value}
    if defaults.get("kv_lora_rank") is not None and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(defaults.get(key), list):
            kinds = list(dict.fromkeys(defaults[key]))
            count = max(_LAYERS, 2 * len(kinds)) if key == "layer_types" else made.get("num_hidden_layers", _LAYERS)
            made |= {key: (kinds * count)[:count], "num_hidden_layers": count}
    for key, part in kind.sub_configs.items():
        if isinstance(defaults.get(key), dict):
            inner = CONFIG_MAPPING[defaults[key]["model_type"]] if part is AutoConfig else part
            made[key] = _small(inner) | ({"model_type": inner.model_type} if part is AutoConfig else {})
    override = _OVERRIDES.get(kind.model_type, {})
    text = {"text_config": _SIZES | override["text_config"]} if "text_config" in override else {}
    return made | override | text


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within, neither transformers nor warnings say anything."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
