"""Weights that are quantised one by one as transformers reads them, so that the whole base is never in memory.

transformers asks about each weight, and reads the next one when it is done: with its conversion of names and layouts,
whatever files a model came in. What files hold as bitsandbytes' codes already becomes ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import DataError, TunerError
from tuner.model.quantize import published
from tuner.model.quantize.codes import Kind
from tuner.model.quantize.layers import QuantizeSpec, put_in_place, quantizable, quantize_
from tuner.model.quantize.linear import QuantizedLinear
from tuner.model.stored import Stored, stored_tensors, weights_directory
from tuner.model.transformers_private import keep_as_made
from tuner.model.vetting import holds_codes


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


@dataclass(frozen=True)
class ReadingQuantizer:
    """Quantises a base while it is read: the `quantize` of a model's spec."""

    spec: QuantizeSpec

    @property
    def kind(self) -> Kind:
        """What weights become."""
        return self.spec.kind

    def reader(self, name_or_path: str, revision: str | None) -> QuantizedReading:
        """What is given the weights of a model's files one by one."""
        is_stored = holds_codes(name_or_path, revision)
        return QuantizedReading(self.spec, PublishedCodes(name_or_path, revision) if is_stored else None)

    def finish(self, model: PreTrainedModel) -> None:
        """Quantise what is not yet, in place."""
        quantize_(model, self.spec)
