"""A model class of the user's own, by which transformers builds what its config says (`model.use`).

It is registered with transformers for its config's `model_type`, in every process that makes the model: from there on
it is found as transformers' own classes are, by the config alone. It gets no other treatment than these: its documents
are proven apart, its layers are those that `_no_split_modules` names, its attention is the packed one where it asks
transformers for attention.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tuner.errors import PluginError
from tuner.runtime.files import sha256_file
from tuner.runtime.plugins import load, source_file


def register(use: str) -> type[PreTrainedModel]:
    """Have transformers know the class that ``use`` names; once or several times. Raises PluginError.

    Its config is a class of its own with a `model_type` that is not transformers', which would be another model's too.
    """
    found: Any = load(use, "tuner.models", Path("/"))
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise PluginError(f"model.use {use} is no class of transformers' PreTrainedModel", hint="derive it from that")
    config: Any = found.config_class
    if config is None or not issubclass(config, PretrainedConfig) or not config.model_type:
        raise PluginError(
            f"model.use {use} has no config_class with a model_type", hint="derive one from PretrainedConfig"
        )
    kind = config.model_type
    is_theirs = config.__module__.startswith("transformers.")
    if is_theirs or (kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is not config):
        raise PluginError(
            f"model.use {use}: model_type {kind!r} is that of a class of transformers",
            hint=f"give its config class a name of its own, such as my_{kind}, and config.json too",
        )
    AutoConfig.register(kind, config, exist_ok=True)
    AutoModelForCausalLM.register(config, found, exist_ok=True)
    return found


def code_facts(use: str) -> dict[str, Any]:
    """The name of the class, and the SHA-256 of its file."""
    file = source_file(register(use))
    return {"use": use, "sha256": None if file is None else sha256_file(file)}
