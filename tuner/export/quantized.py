"""The base that a quantised run trained on: its weights as codes and scales and back, read rows at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import DataError
from tuner.export.source import ExportSource
from tuner.export.tensors import TensorSource, made_tensor, mapped_tensor
from tuner.model.freeze import Content, content_of
from tuner.model.quantize.codes import Kind, Quantized, dequantize, quantize
from tuner.model.quantize.layers import QuantizeSpec, quantizable, quantized_layers
from tuner.model.quantize.published import dequantized_as_stored, read
from tuner.model.quantize.reading import PublishedCodes
from tuner.model.vetting import holds_codes
from tuner.rundir.checkpoints import require_same_quantizer


@dataclass(frozen=True)
class QuantizedBase:
    """Which weights of the plain model were quantised, by name, and how.

    ``codes`` are those of files that hold no other weights: then nothing was quantised, and there is no original.
    """

    kind: Kind
    names: frozenset[str]
    codes: PublishedCodes | None = None

    def tensor(self, name: str, held: TensorSource) -> TensorSource:
        """A tensor of the base as training computed with it, of what its files hold, rounded to the model's type.

        Rows know nothing of one another: each block of them is quantised as it is read.
        """
        if name not in self.names or isinstance(held, CodedSource):
            return held

        return mapped_tensor(held, torch.float32, lambda rows: self._round_trip(name, rows))

    def stored(self, file_name: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSource | None:
        """A weight that files hold as codes; None of one that they hold as it is. It is made when it is first read.

        One that training did not take as codes is in ``dtype``, as that of the base's other weights.
        """
        if self.codes is None or not self.codes.is_part(file_name):
            return None
        is_quantized = name in self.names

        def make() -> torch.Tensor:
            if is_quantized:
                held = self.published(file_name)
                weight = dequantize(held.codes, held.scales, held.columns)
            else:
                weight = dequantized_as_stored(file_name, self._parts(file_name)).to(dtype)
            if tuple(weight.shape) != shape:
                raise DataError(f"the base model's {name} has shape {list(weight.shape)}, the model has {list(shape)}")
            return weight

        made = made_tensor(shape, torch.float32 if is_quantized else dtype, make)
        return CodedSource(made.shape, made.dtype, made.read)

    def published(self, file_name: str) -> Quantized:
        """The codes of a weight as files hold them. Raises DataError and RecipeError for what is not read."""
        return read(file_name, self._parts(file_name))

    def contents(self, file_name: str, layer: str) -> dict[str, Content]:
        """What of published codes goes into the hash of a base, by name."""
        held = self.published(file_name)
        return {f"{layer}.codes": content_of(held.codes), f"{layer}.scales": content_of(held.scales)}

    def _parts(self, file_name: str) -> dict[str, torch.Tensor]:
        found = None if self.codes is None else self.codes.parts(file_name)
        if found is None:
            raise DataError(f"the base model's {file_name} is not stored as codes any more")
        return found

    @torch.no_grad()
    def apply(self, model: PreTrainedModel, held: torch.dtype) -> None:
        """Put the values that training computed with in place of a model's own, in its type, one weight at a time.

        ``held`` is the type in which training held what it did not quantise, and read what it did.
        """
        for name in sorted(self.names):
            weight = model.get_parameter(name)
            weight.data = self._round_trip(name, weight.data.to(held)).to(weight.dtype)

    def _round_trip(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        made = quantize(weight, self.kind, name)
        return dequantize(made.codes, made.scales, made.columns)


class CodedSource(TensorSource):
    """A weight made of published codes: it is not quantised again."""


def quantized_base(source: ExportSource, plain: PreTrainedModel) -> QuantizedBase | None:
    """What a run quantised of its base; None where nothing. ``plain`` is the model without adapter, also on meta.

    Raises DataError where this version quantises otherwise than that which trained.
    """
    spec = quantize_spec(source)
    if spec is None:
        return None
    require_same_quantizer(source.checkpoint, spec.facts())
    return base_of_kind(spec.kind, plain, spec.kept, published_codes(source))


def quantize_spec(source: ExportSource) -> QuantizeSpec | None:
    """How a run's base was quantised. Raises DataError for a way that is not known."""
    if source.quantize == "none":
        return None
    kept = tuple((source.adapter or {}).get("modules_to_save", ()))
    return QuantizeSpec(_known(source.quantize), kept)


def base_of_kind(
    kind: str, plain: PreTrainedModel, kept: Sequence[str], codes: PublishedCodes | None = None
) -> QuantizedBase:
    """The weights that training quantises of this model, but for ``kept`` modules. Raises DataError for other kinds."""
    return QuantizedBase(_known(kind), frozenset(f"{name}.weight" for name in quantizable(plain, kept)), codes)


def published_codes(source: ExportSource) -> PublishedCodes | None:
    """The codes that the base's files hold in place of weights; None where they hold weights."""
    if source.is_random or not holds_codes(source.name_or_path, source.revision):
        return None
    return PublishedCodes(source.name_or_path, source.revision)


@torch.no_grad()
def with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with plain layers, in float32, in place of those that hold codes."""
    for name, layer in quantized_layers(model).items():
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(layer.dequantized(torch.float32), requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    return model


def _known(kind: str) -> Kind:
    if kind not in get_args(Kind):
        raise DataError(f"the base was quantised to {kind}, which this version does not know")
    return cast(Kind, kind)
