"""Names of a model's tensors in its published files, found on the meta device."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model import transformers_private


@dataclass(frozen=True)
class Published:
    """A tensor of the model and the tensors that stand for it in published files, name -> shape.

    ``is_itself`` where it is one tensor, only renamed; others are cut up or arranged otherwise (such as fused experts).
    """

    name: str
    targets: dict[str, tuple[int, ...]]
    is_itself: bool


def state_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once, and persistent buffers, by name."""
    kept = model.state_dict(keep_vars=True).keys()
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    return own | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def published(skeleton: PreTrainedModel) -> list[Published]:
    """All tensors of a model on the meta device in the order of its state, with their published names.

    Raises RecipeError where a published tensor holds several of the model's (HRM).
    """
    state = {name: tensor.detach() for name, tensor in state_names(skeleton).items()}
    whole = transformers_private.revert_weight_conversion(skeleton, dict(state))
    renamed = {id(tensor): name for name, tensor in whole.items()}
    found = []
    for name, tensor in state.items():
        if id(tensor) in renamed:
            found.append(Published(name, {renamed[id(tensor)]: tuple(tensor.shape)}, is_itself=True))
            continue
        parts = transformers_private.revert_weight_conversion(skeleton, {name: tensor})
        found.append(Published(name, {key: tuple(part.shape) for key, part in parts.items()}, is_itself=False))
    names = [key for entry in found for key in entry.targets]
    if sorted(names) != sorted(whole):
        raise RecipeError(
            f"{type(skeleton).__name__} cannot be exported: some tensors of its published files hold several of the "
            "model's each",
            hint="its checkpoints stay as they are: tuner eval and tuner generate read them",
        )
    return found


def converted(skeleton: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The published tensors of the model's tensor of this name."""
    return dict(transformers_private.revert_weight_conversion(skeleton, {name: tensor}))


def assembled(skeleton: PreTrainedModel, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's tensor of this name from its published ones, as transformers makes it when it loads them."""
    owner, _, last = name.rpartition(".")
    module = skeleton.get_submodule(owner)
    before = getattr(module, last)
    try:
        report = transformers_private.load_published(skeleton, parts, before.dtype)
        made: torch.Tensor = getattr(module, last).detach()
    finally:
        setattr(module, last, before)
    if made.is_meta or report.unexpected_keys or report.conversion_errors:
        raise RecipeError(f"{name} cannot be made of {', '.join(parts)}")
    return made.to(next(iter(parts.values())).dtype)
