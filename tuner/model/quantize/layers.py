"""Which layers of a frozen base are quantised, and how: in the place of its own, or one by one as transformers reads
them, so that the whole base is never in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import DataError, RecipeError, TunerError
from tuner.model.adaptable import is_linear, not_adaptable
from tuner.model.adapter import stacked_weights
from tuner.model.build import head_layer
from tuner.model.flops import n_experts
from tuner.model.freeze import select
from tuner.model.quantize import published
from tuner.model.quantize.codes import BLOCK, Kind
from tuner.model.quantize.linear import QuantizedLinear
from tuner.model.stored import Stored, stored_tensors, weights_directory
from tuner.model.transformers_private import keep_as_made, kept_in_float32
from tuner.model.vetting import holds_codes


@dataclass(frozen=True)
class QuantizeSpec:
    """How a base is quantised: what its codes are, and the modules (names or globs) that are ``kept`` as they are."""

    kind: Kind
    kept: Sequence[str] = ()
    native: bool = False
    """Whether the CPU makes codes by the compiled kernel: the same bits, sooner."""

    def facts(self) -> dict[str, Any]:
        """What says, with the unquantised weights, which codes and scales there are: a checkpoint notes it."""
        return {"kind": self.kind, "block": BLOCK, "scales": "float32", "version": 1}

    def reader(self, name_or_path: str, revision: str | None) -> "QuantizedReading":
        """What is given the weights of a model's files one by one."""
        is_stored = holds_codes(name_or_path, revision)
        return QuantizedReading(self, PublishedCodes(name_or_path, revision) if is_stored else None)

    def finish(self, model: PreTrainedModel) -> None:
        """Quantise what is not yet, in place."""
        quantize_(model, self)


def quantizable(model: PreTrainedModel, kept: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The layers of a model without an adapter that are quantised, by name; it may be on the meta device.

    They are the linear layers that an adapter may adapt. Not among them: the output layer, routers, what the class
    keeps in float32, what is ``kept`` because it is trained, and layers with the weight in another order (`Conv1D`).
    Raises RecipeError for a name in ``kept`` that means nothing, and where no layer is left.
    """
    experts, float32 = n_experts(model.config.get_text_config()), kept_in_float32(model)
    inside = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_linear(module) and not isinstance(module, QuantizedLinear)
        # A router has one number for each expert, or one for an expert that is shared.
        if module is not head_layer(model) and module.out_features not in {1, experts}
        if "router" not in name.rpartition(".")[2] and f"{name}.weight" not in float32
    }
    owning = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    whole = select(kept, owning, "adapter.modules_to_save")
    bad = not_adaptable(model, inside)
    within = tuple(f"{other}." for other in whole)
    left = {name: one for name, one in inside.items() if name not in bad and not f"{name}.".startswith(within)}
    if not left and not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise RecipeError(
            f"model.quantize: a {model.config.model_type} model has no linear layers that can be quantised",
            hint="write model.quantize: none",
        )
    return left


def quantize_(model: PreTrainedModel, spec: QuantizeSpec) -> None:
    """Quantise such layers one after the other, in place; those that are quantised already stay as they are."""
    layers = quantizable(model, spec.kept)
    for name in list(layers):
        put_in_place(model, name, layers.pop(name).weight, spec)


def put_in_place(model: PreTrainedModel, name: str, weight: Any, spec: QuantizeSpec) -> None:
    """Put a layer with this weight ``[out, in]``, quantised, in the place of the linear layer of this name."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    made = QuantizedLinear.of(layer, weight.detach(), spec.kind, f"{name}.weight", spec.native)
    keep_as_made(made)
    model.set_submodule(name, made)


def left_whole(model: nn.Module) -> str | None:
    """A sentence on large weights of layers that stay unquantised; None where there are none."""
    stacked = stacked_weights(model)
    others = [name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    names = [*stacked, *others]
    if not names:
        return None
    return (
        f"model.quantize: {len(names)} weights stay as they are, such as {names[0]}: "
        "only linear layers are quantised, no experts that lie in one tensor"
    )


def quantized_layers(model: nn.Module) -> Mapping[str, QuantizedLinear]:
    """The quantised layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


class PublishedCodes:
    """The weights that a model's files hold as codes of bitsandbytes, found by their headers."""

    def __init__(self, name_or_path: str, revision: str | None) -> None:
        self._stored = stored_tensors(weights_directory(name_or_path, revision))
        self._parts = published.grouped(self._stored)

    def parts(self, name: str) -> dict[str, torch.Tensor] | None:
        """What the files hold of a weight by its name there, each part read now; None of one that is plain numbers."""
        names = self._parts.get(name)
        return None if names is None else {part: _read(self._stored[each], each) for part, each in names.items()}

    def is_part(self, name: str) -> bool:
        """Whether a tensor of the files goes with the codes of a weight."""
        return any(name in names.values() for names in self._parts.values())


def _read(stored: Stored, name: str) -> torch.Tensor:
    with safe_open(stored.file, "pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


class QuantizedReading:
    """Quantises the weights of linear layers while they are read, one after the other.

    An error is raised when all is read: transformers would make a report without its hint of it.
    """

    def __init__(self, spec: QuantizeSpec, codes: PublishedCodes | None) -> None:
        self.spec, self.codes = spec, codes
        self.layers: dict[str, tuple[int, ...]] = {}
        """Shapes of the weights that are waited for, by the name of their layer."""
        self.error: TunerError | None = None

    def begin(self, model: PreTrainedModel) -> None:
        """Choose the layers."""
        self.layers = {name: tuple(layer.weight.shape) for name, layer in quantizable(model, self.spec.kept).items()}

    def wants(self, name: str) -> bool:
        """Whether a tensor of the model is the weight of a layer that is waited for, or may be stored as codes."""
        layer, _dot, last = name.rpartition(".")
        return last == "weight" and (layer in self.layers or self.codes is not None)

    def take(self, model: PreTrainedModel, name: str, weight: torch.Tensor, source: str | None) -> torch.Tensor | None:
        """Quantise a weight in its layer; what of it goes into the model as it is otherwise, None for nothing."""
        try:
            return self._taken(model, name, weight, source)
        except TunerError as error:
            self.error = self.error or error
            return None

    def end(self) -> None:
        """Raise the first error that there was."""
        if self.error is not None:
            raise self.error

    def knows(self, name: str) -> bool:
        """Whether a tensor of the files goes with published codes."""
        return self.codes is not None and self.codes.is_part(name)

    def _taken(
        self, model: PreTrainedModel, name: str, weight: torch.Tensor, source: str | None
    ) -> torch.Tensor | None:
        layer = name.removesuffix(".weight")
        shape = self.layers.pop(layer, None)
        parts = None if self.codes is None or source is None else self.codes.parts(source)
        if parts is not None and shape is not None:
            self._put_published(model, layer, parts)
            return None
        if parts is not None:
            weight = published.dequantized_as_stored(name, parts).to(model.dtype)
        if shape is None or tuple(weight.shape) != shape:
            wanted = tuple(model.get_parameter(name).shape)
            if self.codes is not None and tuple(weight.shape) != wanted:
                raise DataError(f"{name}: the files hold {[*weight.shape]} of it, the model has {[*wanted]}")
            return weight  # of a shape that is not the model's: transformers reports it
        put_in_place(model, layer, weight, self.spec)
        return None

    def _put_published(self, model: PreTrainedModel, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        """Put a layer with published codes in the place of one without: they are its base, nothing was before them."""
        layer, held = model.get_submodule(name), published.read(f"{name}.weight", parts)
        assert isinstance(layer, nn.Linear)
        if (len(held.codes), held.columns) != (layer.out_features, layer.in_features):
            raise DataError(
                f"{name}.weight: the files hold {[len(held.codes), held.columns]} of it, "
                f"the model has {[layer.out_features, layer.in_features]}"
            )
        made = QuantizedLinear(layer, held)
        keep_as_made(made)
        model.set_submodule(name, made)
