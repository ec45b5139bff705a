"""What a model has places for: its parameters by name before anything is built, and what files call them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.init_from.sources import LORA_A, LORA_B, MAGNITUDE, NEW_ROWS, plain_name
from tuner.model.adapter import ADAPTER, LoraSpec, lora_layers
from tuner.model.build import is_part
from tuner.model.stored import Published, published, state_names
from tuner.model.tokens import trainable_tokens
from tuner.model.trainable import TrainableSpec

OF_ADAPTER = (LORA_A, LORA_B, MAGNITUDE, NEW_ROWS)
"""The ends of names that the model gets only when it is made trainable."""


class TargetTensor(NamedTuple):
    """A parameter, or a buffer that files hold: its name without an adapter, its shape, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    grows: bool = False
    """Whether its rows are those of the vocabulary."""

    @property
    def is_of_adapter(self) -> bool:
        """Whether it is there only once the model is made trainable."""
        return self.name.endswith(OF_ADAPTER)


@dataclass(frozen=True)
class InitTarget:
    """The places of a model, and its names in published files; nothing of it has values."""

    places: Mapping[str, TargetTensor]
    twins: Mapping[str, str]
    """Other names of tied weights, by them the name of their place."""
    files: Mapping[str, Published]
    """By the name of a tensor in published files, what of the model it is, or is a part of."""
    skeleton: PreTrainedModel
    """The model on the meta device, without an adapter."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """The factor of B·A of each layer that this run adapts, by its name."""
    use_dora: bool = False
    transposed: frozenset[str] = frozenset()
    """Layers whose weight is ``[in, out]``."""
    quantized: frozenset[str] = frozenset()
    """Weights that are held as codes."""
    prefix: str = ""
    """The name of the decoder, which files may leave out or put in front."""

    def place_of(self, name: str) -> TargetTensor | None:
        """The place of this very name, or of the weight that is tied to it."""
        return self.places.get(self.twins.get(name, name))

    def published(self, name: str) -> tuple[str, Published] | None:
        """What files call by this name, with the decoder's name or without it."""
        for each in (name, name.removeprefix(self.prefix), self.prefix + name):
            if each in self.files:
                return each, self.files[each]
        return None


def target_of(
    plain: PreTrainedModel, adapted: PreTrainedModel, trainable: TrainableSpec, quantized: frozenset[str] = frozenset()
) -> InitTarget:
    """The places of a model: ``plain`` and ``adapted`` are on the meta device, the latter as it will be trained.

    Raises RecipeError for a language model that is a part of a multimodal checkpoint.
    """
    if is_part(plain):
        raise RecipeError(
            "model.init_from: the language model of a multimodal checkpoint cannot take weights from elsewhere",
            hint="name the directory of those weights as model.name_or_path",
        )
    ends = [layer for layer in (plain.get_input_embeddings(), plain.get_output_embeddings()) if layer is not None]
    rows = {id(parameter) for layer in ends for parameter in layer.parameters(recurse=False)}
    grows = {name for name, tensor in state_names(plain).items() if id(tensor) in rows}
    places = {}
    for own, tensor in state_names(adapted).items():
        name = plain_name(own)
        trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        places[name] = TargetTensor(name, tuple(tensor.shape), trained, name in grows)
    layers: list[tuple[str, Any]] = lora_layers(adapted) if isinstance(trainable.adapter, LoraSpec) else []
    conv = {name for name, module in plain.named_modules() if type(module).__name__ == "Conv1D"}
    entries = published(plain)
    return InitTarget(
        places=places, twins=_twins(plain), files={target: entry for entry in entries for target in entry.targets},
        skeleton=plain, scales={name: float(layer.scaling[ADAPTER]) for name, layer in layers},
        use_dora=isinstance(trainable.adapter, LoraSpec) and trainable.adapter.use_dora, transposed=frozenset(conv),
        quantized=quantized, prefix=f"{plain.base_model_prefix}.",
    )


def _twins(plain: PreTrainedModel) -> dict[str, str]:
    main = {id(parameter): name for name, parameter in plain.named_parameters()}
    every = plain.named_parameters(remove_duplicate=False)
    return {name: main[id(parameter)] for name, parameter in every if main[id(parameter)] != name}


def own_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model by the names of their places."""
    return {plain_name(name): tensor for name, tensor in state_names(model).items()}


def layers_of_new_rows(model: torch.nn.Module) -> dict[str, Any]:
    """The layers whose rows of new tokens are a tensor apart, by the name of their weight's place."""
    return {f"{name}.weight": layer for name, layer in trainable_tokens(model).items()}
