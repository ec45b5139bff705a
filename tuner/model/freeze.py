"""Parameters that are left as they are: chosen in full fine-tuning, and told apart from changed ones by their hash."""

import hashlib
from collections.abc import Sequence
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


def frozen_hash(model: PreTrainedModel) -> str | None:
    """SHA-256 over names, types, shapes and bytes of the parameters that are not trained; None where all are.

    Names are those of the model without an adapter (peft keeps base weights under ``base_layer``). Tensors are hashed
    side by side, one on each core.
    """
    frozen = {name.replace(".base_layer.", "."): p for name, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return None
    names = sorted(frozen)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = pool.map(lambda name: _digest(frozen[name].detach()), names)
        contents = dict(zip(names, digests, strict=True))
    facts = [f"{name} {frozen[name].dtype} {list(frozen[name].shape)} {contents[name]}" for name in names]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return hashlib.sha256(content).hexdigest()
