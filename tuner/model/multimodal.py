"""The language model of a multimodal checkpoint: the whole class without its other parts, and what files hold of these.

Its tensors keep the names that they have in the whole model, so that adapters and exports fit that. The other parts
(vision and audio towers, projectors) are never loaded: they stay in the files, and an export copies them from there.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tuner.config.methods import Head
from tuner.errors import RecipeError
from tuner.model.stored import Stored, hash_of_all, hashes, stored_tensors, weights_directory
from tuner.model.transformers_private import file_places, keep_as_made, new_of_class


def whole_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the whole model where a config is one of a multimodal checkpoint; None where it is not.

    Some configs serve files of the whole model and of its language model alone: the architecture that they name tells.
    """
    kind: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind is None or text_key(config) == "" or config.is_encoder_decoder:
        return None
    alone = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_whole = alone is None or alone is kind or kind.__name__ in (config.architectures or ())
    return kind if is_whole else None


def text_key(config: PretrainedConfig) -> str:
    """The key under which a config holds that of its language model; empty where it is that itself."""
    text = config.get_text_config()
    return next((key for key in config.sub_configs if text is not config and getattr(config, key, None) is text), "")


def whole_auto(config: PretrainedConfig) -> Any:
    """What of transformers finds the class of a whole model, as its readers load it."""
    of_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if of_images else transformers.AutoModelForMultimodalLM


def config_of_language_model(
    config: PretrainedConfig, head: Head, drawn: bool, override: Callable[[PretrainedConfig], PretrainedConfig]
) -> PretrainedConfig:
    """The config to train a checkpoint with that has a language model in it, with the recipe's values by ``override``.

    Weights that are ``drawn`` are those of the language model alone, and so is the config. Raises RecipeError.
    """
    if whole_class(config) is None:
        return override(config)
    text = config.get_text_config()
    if head == "score":
        raise RecipeError(
            f"method.kind: reward: a score on the language model of a multimodal checkpoint ({config.model_type}) "
            "cannot be put back into it",
            hint="choose a checkpoint that is a language model alone",
        )
    if not drawn:
        setattr(config, text_key(config), override(text))
        return config
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(
            f"model.init: random: transformers has no class for the language model of {config.model_type} alone",
            hint="train from its weights: model.init: pretrained",
        )
    return override(text)


@cache
def without_other_parts(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class of the same name that makes a model and leaves out all but its language model.

    ``left_out`` of its models are the numbers of parameters of what was left out, by name.
    """

    def make(self: Any, config: PretrainedConfig, *inputs: Any, **options: Any) -> None:
        kind.__init__(self, config, *inputs, **options)
        self.left_out = leave_out_other_parts(self)
        tied = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {one: other for one, other in tied if not is_left_out(self, one)}

    def attend_by(self: Any, attn_implementation: str | dict[str, str], **options: Any) -> None:
        if isinstance(attn_implementation, str):  # of parts that are not here there is none, and transformers warns
            attn_implementation = {"": attn_implementation, text_key(self.config): attn_implementation}
        kind.set_attn_implementation(self, attn_implementation, **options)

    members = {
        "__init__": make,
        "__module__": kind.__module__,  # transformers looks conversions of weights up by the names of class and module
        "from_config": classmethod(new_of_class),
        "set_attn_implementation": attend_by,
    }
    return type(kind.__name__, (kind,), members)


def leave_out_other_parts(model: PreTrainedModel) -> dict[str, int]:
    """Take out of a whole model, in place, all that is no part of its language model; how many parameters, by name.

    What stays is the decoder and the output layer. Raises RecipeError for a model that does not say which they are.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    embeddings = model.get_input_embeddings()
    if decoder is model or head not in names or not names.get(decoder) or embeddings not in set(decoder.modules()):
        raise RecipeError(
            f"model.name_or_path: {type(model).__name__} does not say which of its parts is its language model",
            hint="choose a causal language model",
        )
    left_out: dict[str, int] = {}
    _prune(model, "", {names[decoder], names[head]}, left_out)
    return left_out


def _prune(module: nn.Module, prefix: str, kept: Collection[str], left_out: dict[str, int]) -> None:
    """Leave out the children and tensors of a module on the way to those that are kept, but for what leads there."""
    keep_as_made(module)
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            left_out[prefix + name] = parameter.numel()
            module._parameters[name] = None
    for name in list(module._buffers):
        module._buffers[name] = None
    for name, child in list(module._modules.items()):
        path = prefix + name
        if child is None or path in kept:
            continue
        if any(other.startswith(f"{path}.") for other in kept):
            _prune(child, f"{path}.", kept, left_out)
            continue
        left_out[path] = sum(parameter.numel() for parameter in child.parameters())
        module._modules[name] = None


def is_left_out(model: nn.Module, key: str) -> bool:
    """Whether a tensor of this name in the whole model belongs to what was left out of its language model."""
    left_out: Mapping[str, int] = getattr(model, "left_out", {})
    return any(key == name or key.startswith(f"{name}.") for name in left_out)


def description(model: PreTrainedModel, name_or_path: str) -> str:
    """What is trained of a multimodal checkpoint and what stays as it is, in words; bytes where the files are here."""
    left_out: Any = model.left_out
    named = [name for name, count in left_out.items() if count]
    size = f"{_short(sum(left_out.values()), '')}parameters"
    if Path(name_or_path).is_dir():
        size += f", {_short(sum(stored.size for stored in untouched(model, Path(name_or_path)).values()), 'bytes')}"
    others = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    return f"the language model of {model.config.model_type}; {others} ({size}) stay as they are in its files, unread"


def _short(count: int, unit: str) -> str:
    if count < 10**6:
        return f"{count:,} {unit}"
    return f"{count / 1e6:,.1f} {'MB' if unit else 'M '}"


def untouched(model: PreTrainedModel, directory: Path) -> dict[str, Stored]:
    """The tensors of a whole checkpoint that no tensor of its language model is made of, by their names there."""
    stored = stored_tensors(directory)
    own = model.state_dict().keys()
    return {name: stored[name] for name, place in file_places(model, stored).items() if place.key not in own}


def untouched_facts(model: PreTrainedModel, name_or_path: str, revision: str | None) -> dict[str, Any]:
    """What a run notes of the tensors that it leaves as they are: how many, their bytes and their hash.

    Raises DataError for files that are absent or damaged.
    """
    found = untouched(model, weights_directory(name_or_path, revision))
    size = sum(stored.size for stored in found.values())
    return {"tensors": len(found), "bytes": size, "sha256": hash_of_all(hashes(found))}


def names_in_files(model: PreTrainedModel, targets: Iterable[str], found: Iterable[str]) -> dict[str, str | None]:
    """What files call each published tensor of a language model, in whichever spelling; None of one they lack."""
    there = {place.renamed: name for name, place in file_places(model, found).items()}
    return {target: there.get(place.renamed) for target, place in file_places(model, targets).items()}
