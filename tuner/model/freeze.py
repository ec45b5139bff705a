"""Parts of a model chosen by name, such as parameters that are left as they are, and the hash of these."""

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError


def select(patterns: Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """The ``names`` that a pattern means, in their order; ``*`` stands for any characters, dots too.

    A pattern means a dotted name that it matches whole or from a dot on (``q_proj``, ``self_attn.*_proj``), and
    everything below one. Raises RecipeError, blaming ``key``, for a pattern that means nothing.
    """
    known = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in known if means(pattern, name)}
        if not found:
            near = _near(pattern, known)
            raise RecipeError(
                f"{key}: {pattern!r} matches nothing in this model",
                hint=f"did you mean {' or '.join(near)}?" if near else f"the first names are {', '.join(known[:5])}",
            )
        chosen |= found
    return [name for name in known if name in chosen]


def select_modules(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The modules of a model that a pattern means, with those below them, by name. Raises RecipeError, blaming ``key``.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    return {name: modules[name] for name in select(patterns, modules, key)}


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


class Content(NamedTuple):
    """What of a tensor goes into a hash of many."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str
    """Of its bytes."""


def frozen_tensors(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Content]]:
    """The parameters that are not trained, by their names in the model without an adapter: what their hash is of.

    Tensors, and the contents of those that the model does not hold as they were: of a quantised layer the weight counts
    as it was before.
    """
    weights: dict[str, Content] = {}
    held: set[str] = set()
    for name, module in model.named_modules():
        if (content := getattr(module, "unquantized", None)) is not None:
            weights[f"{name}.weight".replace(".base_layer.", ".")] = content
            held |= {f"{name}.codes", f"{name}.scales"}
    names = {name: own for name, own in frozen_names(model).items() if own not in held}
    return {name: model.get_parameter(own).detach() for name, own in names.items()}, weights


def all_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, by name: what a model computes with."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def content_of(tensor: torch.Tensor, parts: Iterable[torch.Tensor] = ()) -> Content:
    """Type, shape and SHA-256 of a tensor; of the values of ``parts``, one after the other, where any are given."""
    found = hashlib.sha256()
    for part in parts or [tensor]:
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return Content(tensor.dtype, tuple(tensor.shape), found.hexdigest())


def hash_of_frozen(contents: Mapping[str, tuple[torch.dtype, Sequence[int], str]]) -> str | None:
    """SHA-256 over names, types, shapes and bytes of tensors, by type, shape and SHA-256 of each; None of none."""
    facts = [f"{name} {dtype} {list(shape)} {sha256}" for name, (dtype, shape, sha256) in sorted(contents.items())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest() if facts else None


def means(pattern: str, name: str) -> bool:
    """Whether a pattern means a name, whole or from a dot on, or one above it."""
    ends = [index for index, letter in enumerate(name) if letter == "."] + [len(name)]
    return any(fnmatchcase(name[:end], pattern) or fnmatchcase(name[:end], f"*.{pattern}") for end in ends)


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names, whole or of one component, that look like the pattern."""
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    return difflib.get_close_matches(pattern, parts, 3, 0.6) or difflib.get_close_matches(pattern, names, 3, 0.5)
