"""Parameters that are left as they are: chosen in full fine-tuning, and told apart from changed ones by their hash."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.select import select


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Take the parameters that a pattern means out of training, in place: no gradient, no optimizer state.

    Tied parameters are one tensor: the name of either freezes it. Raises RecipeError for a pattern that means nothing,
    or when nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in select(patterns, parameters, "model.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError("model.freeze: no parameter is left to train", hint="leave some out of the list")


def frozen_names(model: PreTrainedModel) -> dict[str, str]:
    """The parameters that are not trained: name in a model without an adapter -> name in this one.

    peft keeps base weights under ``base_layer``.
    """
    return {name.replace(".base_layer.", "."): name for name, p in model.named_parameters() if not p.requires_grad}


def frozen_hash(model: PreTrainedModel) -> str | None:
    """SHA-256 over names, types, shapes and bytes of the parameters that are not trained; None where all are.

    Names are those of the model without an adapter. Tensors are hashed side by side, one on each core.
    """
    frozen = {name: model.get_parameter(own).detach() for name, own in frozen_names(model).items()}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = dict(zip(frozen, pool.map(_digest, frozen.values()), strict=True))
    return hash_of_frozen({name: (p.dtype, p.shape, digests[name]) for name, p in frozen.items()})


def hash_of_frozen(contents: Mapping[str, tuple[torch.dtype, Sequence[int], str]]) -> str | None:
    """The same from type, shape and SHA-256 of the bytes of each, by name."""
    facts = [f"{name} {dtype} {list(shape)} {sha256}" for name, (dtype, shape, sha256) in sorted(contents.items())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest() if facts else None


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.sha256(content).hexdigest()
