"""Why a model cannot be trained: the property of it that stands in the way, and the key that changes it, if any."""

import json
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from tuner.errors import RecipeError
from tuner.model.transformers_private import plain_config

_AS_DECODER = {
    "is_decoder": True, "causal": True, "is_causal": True, "attn_type": "uni", "use_bidirectional_attention": None,
}
"""Keys by which a config can say that tokens see later ones, with what a decoder has there: BERT and its kin, XLM, all
that use transformers' mask functions, XLNet, Gemma."""
_MOST_CHARACTERS = 160


def not_causal(
    config: PretrainedConfig, moved: float, is_causal: Callable[[PretrainedConfig], bool]
) -> tuple[str, str]:
    """What to say of a model whose later tokens move earlier logits by ``moved``: the reason, and the hint.

    ``is_causal`` tries it with another config: a key is named only where changing it makes the model causal.
    """
    found = f"a later token moves earlier logits by {moved:.1e} where transformers alone has loaded it"
    for key, value in _keys_of_encoders(config).items():
        if is_causal(_as_decoder(config, key)):
            reason = f"with {key}: {_in_yaml(value)} in its config its tokens see later ones ({found})"
            return reason, f"write model.config.{key}: {_in_yaml(_AS_DECODER[key])}, with which it is causal"
    return f"its tokens see later ones, whatever its config says ({found})", "choose a causal language model"


def in_words(error: Exception) -> str:
    """What a model's own code says of the inputs that it is given, without names of Python's types."""
    text = _one_line(error)
    if isinstance(error, (TypeError, AttributeError, KeyError)) or "NoneType" in text or not text:
        return "its code reads a mask or another input that it is not given"
    if isinstance(error, IndexError):
        return "a table of it has no row for an id or a position"
    return text


def unbuildable(config: PretrainedConfig, error: Exception) -> RecipeError:
    """What to say of a config of which its class makes no model."""
    if hasattr(config, "backbone_hidden_size"):  # Gemma 4's assistants
        return RecipeError(
            f"model: a {config.model_type} model drafts tokens for another model, whose keys and values it reads: "
            "it has none of its own to be trained with",
            hint="choose the model that it drafts for",
        )
    text = _one_line(error)
    if isinstance(error, (AttributeError, KeyError)):
        key = error.name if isinstance(error, AttributeError) and error.name else text.rpartition(" ")[2].strip("'")
        text = f"its class looks for a key that it does not have ({key})"
    return RecipeError(
        f"model: no causal language model can be built from this {config.model_type} config: {text}",
        hint="choose a causal language model, or look at model.config",
    )


def require_positions(config: PretrainedConfig, padding_number: int, longest: int) -> None:
    """Check that a model which numbers tokens from its padding token on has numbers for ``longest`` of them.

    Raises RecipeError with what is left of the config's positions.
    """
    there = getattr(config.get_text_config(), "max_position_embeddings", None)
    if there is None or longest <= there - padding_number - 1:
        return
    raise RecipeError(
        f"data.max_length: {longest:,} is above the model's {there - padding_number - 1:,} positions: it numbers "
        f"tokens from {padding_number + 1} on, and has {there:,} numbers",
        hint=f"set data.max_length to at most {there - padding_number - 1:,}",
    )


def _keys_of_encoders(config: PretrainedConfig) -> dict[str, Any]:
    """The keys of a config that may let tokens see later ones, with what stands there."""
    text = config.get_text_config()
    there = {key: getattr(text, key, None) for key in _AS_DECODER}
    return {key: value for key, value in there.items() if value is not None and value != _AS_DECODER[key]}


def _as_decoder(config: PretrainedConfig, key: str) -> PretrainedConfig:
    """The config with one key as a decoder has it, in which each class chooses its attention."""
    changed = plain_config(config)
    for part in {id(part): part for part in (changed, changed.get_text_config())}.values():
        if hasattr(part, key):
            setattr(part, key, _AS_DECODER[key])
    return changed


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS].rstrip()} ..."


def _in_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
