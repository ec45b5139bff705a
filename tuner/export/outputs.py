"""What an export holds: every tensor under its published name, with its values' source; nothing is loaded yet."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.export import tensors, weights
from tuner.export.source import ExportSource
from tuner.export.tensors import OpenFiles, Output, TensorSource
from tuner.export.weights import exact_names, quantized_base
from tuner.export.write import expert_names, peft_name, tied_and_saved
from tuner.model.adapter import ADAPTER, LoraSpec, lora_layers
from tuner.model.build import meta_model
from tuner.model.experts import LORA_A, LORA_B, adapted_experts, adapted_weights
from tuner.model.low_rank import LowRank
from tuner.model.peft_kinds import PeftSpec, merged_weights
from tuner.model.stored import Published, converted, published
from tuner.model.tokens import trainable_tokens


@dataclass(frozen=True)
class Trained:
    """The trained model without its values: on the meta device, as it is published and with its adapter inside.

    ``names`` are the tensors that the checkpoint holds of it, by their names in the model with the adapter.
    """

    plain: PreTrainedModel
    adapted: PreTrainedModel
    names: frozenset[str]
    adapter: LoraSpec | PeftSpec | None


def trained_skeleton(source: ExportSource) -> Trained:
    """Build both and hold them against the checkpoint.

    Raises DataError where the checkpoint lacks a trained tensor, holds another, or one of another shape.
    """
    config, choice = weights.read_config(source), weights.trainable_spec_of(source)
    plain = meta_model(config, torch.float32, source.head)
    adapted = plain if choice.is_all else meta_model(config, torch.float32, source.head)
    choice.apply(adapted, seed=0)
    wanted = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    weights.require_tensors(source, wanted)
    return Trained(plain, adapted, frozenset(wanted), choice.adapter)


class ExportedValues:
    """Where the values of each of the model's tensors come from: the checkpoint, the base model's files, or both."""

    def __init__(self, source: ExportSource, trained: Trained, files: OpenFiles, original: bool = False) -> None:
        """``original`` takes the weights of a quantised base as they were before that: not those trained on."""
        self._source, self._trained, self._files = source, trained, files
        self._base = None if original else quantized_base(source, trained.plain)
        self._indices = [(info, info.index()) for info in source.checkpoints]
        self._adapters: Mapping[str, Callable[[], LowRank]] = {}
        self._of_experts: Mapping[str, Callable[[], LowRank]] = {}
        self._merged: Mapping[str, torch.Tensor] = {}
        """Of adapters by peft's own config, the tensors of adapted layers as peft merges them."""
        self._trained_names = {name.replace(".base_layer.", "."): name for name in trained.names}
        self._exact = exact_names(source, trained.plain)
        self._new_rows = {f"{name}.weight": f"{name}.new_rows" for name in trainable_tokens(trained.adapted)}

    def merged(self, dtype: torch.dtype, with_adapter: bool = True) -> list[Output]:
        """Every published tensor of the plain model, or of the one the adapter was trained on; floats in ``dtype``.

        Raises RecipeError where one tensor would have to be adapted and not adapted, DataError for the base's files.
        """
        entries, frozen = self._entries(with_adapter)
        return [output for entry in entries for output in self._outputs_of(entry, frozen, dtype)]

    def low_rank(self) -> dict[str, LowRank]:
        """The adapter of each adapted weight by its published name; by the model's own where it is published otherwise.

        That is in parts, or as the weight that it is tied to.
        """
        named = {entry.name: next(iter(entry.targets)) for entry in published(self._trained.plain) if entry.is_itself}
        layers = {f"{name}.weight": (name, layer) for name, layer in lora_layers(self._trained.adapted)}
        return {named.get(weight, weight): self._read_low_rank(name, one) for weight, (name, one) in layers.items()}

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, TensorSource]]:
        """Every tensor of the plain model by its name there, not laid out for files.

        They are as they were trained, or with a type rounded as :meth:`merged` writes them.
        """
        entries, frozen = self._entries()
        for entry in entries:
            found = self._source_of(entry, frozen) or frozen.assembled(entry)
            kind = found.dtype if dtype is None else _written(found, self._type_of(entry, dtype))
            yield entry.name, tensors.rounded_tensor(found, kind)

    def _entries(self, with_adapter: bool = True) -> tuple[list[Published], weights.Frozen]:
        """All tensors of the plain model, and what holds those that were not trained."""
        if isinstance(self._trained.adapter, PeftSpec):
            self._merged = merged_weights(weights.load_trained(self._source))
        elif with_adapter:
            self._of_experts = self._low_rank_of_experts()
            self._adapters = self._low_rank() | self._of_experts
        entries = published(self._trained.plain)
        left = [entry for entry in entries if entry.name not in self._trained_names]
        return entries, weights.Frozen(self._source, self._trained.plain, self._files, left, self._base)

    def adapter(self, dtype: torch.dtype) -> list[Output]:
        """Every trained tensor of the adapter by peft's name, in ``dtype``."""
        return [Output(target, dtype, self._as_in_peft(name)) for target, name in names_in_peft(self._trained).items()]

    def _as_in_peft(self, name: str) -> TensorSource:
        """A trained tensor as peft has it: the ranks of all experts are one dimension there."""
        found = self.checkpoint(name)
        if not name.endswith((LORA_A, LORA_B)):
            return found
        shape = in_peft(name, torch.empty(found.shape, device="meta")).shape
        return tensors.made_tensor(tuple(shape), found.dtype, lambda: in_peft(name, found.whole()))

    def checkpoint(self, name: str) -> TensorSource:
        """A trained tensor of the model with its adapter."""
        key = self._source.prefix + name
        found = [tensors.checkpoint_tensor(self._files, info.path, key, index[key]) for info, index in self._indices]
        return tensors.mean_tensor(found) if self._source.averaged else found[0]

    def _source_of(self, entry: Published, frozen: weights.Frozen) -> TensorSource | None:
        """A tensor with its adapter and its new tokens; None where it is frozen and the files hold it in parts."""
        if entry.name in self._merged:
            return tensors.held_tensor(self._merged[entry.name])
        trained = self._trained_names.get(entry.name)
        found = frozen.tensor(entry) if trained is None else self.checkpoint(trained)
        if entry.name in self._of_experts:
            found = frozen.later(entry) if found is None else found
        elif entry.name in self._adapters and (found is None or not entry.is_itself):
            raise RecipeError(
                f"{entry.name} is adapted and published as {weights.some(list(entry.targets))}: it cannot be merged",
                hint="export with --adapter keep",
            )
        if found is not None and entry.name in self._adapters:
            found = tensors.merged_tensor(found, self._adapters[entry.name])
        if found is not None and entry.name in self._new_rows:
            rows = self.checkpoint(self._new_rows[entry.name])
            found = tensors.replaced_tensor(found, rows, self._source.new_ids.start)
        return found

    def _outputs_of(self, entry: Published, frozen: weights.Frozen, dtype: torch.dtype) -> Iterable[Output]:
        found = self._source_of(entry, frozen)
        dtype = self._type_of(entry, dtype)
        if found is None and frozen.is_quantized(entry):
            found = frozen.later(entry)
        if found is not None:
            return _laid_out(self._trained.plain, entry, found, dtype)
        return [Output(target, _written(part, dtype), part) for target, part in frozen.parts(entry).items()]

    def _type_of(self, entry: Published, dtype: torch.dtype) -> torch.dtype:
        """Some are float32 whatever the others are."""
        return torch.float32 if entry.name in self._exact else dtype

    def alone(self, model: PreTrainedModel, names: Mapping[str, str], dtype: torch.dtype) -> list[Output]:
        """Every published tensor of a language model that stands alone; ``names`` are the tensors' there, by ours.

        Raises what :meth:`merged` raises.
        """
        entries, frozen = self._entries()
        own, outputs = {names[entry.name]: entry for entry in entries}, list[Output]()
        for entry in published(model):
            held = own[entry.name]
            found = self._source_of(held, frozen) or frozen.later(held)
            outputs += _laid_out(model, entry, found, self._type_of(held, dtype))
        return outputs

    def _low_rank_of_experts(self) -> dict[str, Callable[[], LowRank]]:
        """The same of the weights of routed experts."""
        def read(weight: str, module: Any) -> LowRank:
            a, b = (self.checkpoint(weight + end).whole().float() for end in (LORA_A, LORA_B))
            return LowRank(a, b, float(module.lora.scale), transposed=bool(module.is_transposed))

        experts: dict[str, Any] = adapted_experts(self._trained.adapted)
        weights = {f"{name}.{each}": module for name, module in experts.items() for each in adapted_weights(module)}
        return {weight: partial(read, weight, module) for weight, module in weights.items()}

    def _low_rank(self) -> dict[str, Callable[[], LowRank]]:
        """What reads the adapter of each adapted weight, by the weight's name in the plain model."""
        layers = {f"{name}.weight": (name, layer) for name, layer in lora_layers(self._trained.adapted)}
        if self._source.adapter is not None:
            _require_untied(self._trained.plain, set(layers))
        return {weight: partial(self._read_low_rank, *found) for weight, found in layers.items()}

    def _read_low_rank(self, name: str, layer: Any) -> LowRank:
        length = f"{name}.lora_magnitude_vector.{ADAPTER}.weight"
        return LowRank(
            a=self.checkpoint(f"{name}.lora_A.{ADAPTER}.weight").whole().float(),
            b=self.checkpoint(f"{name}.lora_B.{ADAPTER}.weight").whole().float(),
            scale=float(layer.scaling[ADAPTER]),
            length=self.checkpoint(length).whole().float() if length in self._trained.names else None,
            transposed=bool(layer.fan_in_fan_out),
        )


def _laid_out(model: PreTrainedModel, entry: Published, found: TensorSource, dtype: torch.dtype) -> list[Output]:
    """A tensor of the model as its published files hold it."""
    parts = dict.fromkeys(entry.targets, found)
    if not entry.is_itself:
        rounded = tensors.rounded_tensor(found, _written(found, dtype))
        parts = tensors.converted_tensors(rounded, partial(converted, model, entry.name), entry.targets)
    return [Output(target, _written(part, dtype), part) for target, part in parts.items()]


def names_in_peft(trained: Trained) -> dict[str, str]:
    """What peft's files hold of an adapter: the trained tensors' names, by its own."""
    of_experts = expert_names(trained.adapted)
    names = {peft_name(of_experts.get(name, name)): name for name in sorted(trained.names)}
    if trained.adapter is not None and (tied := tied_and_saved(trained.adapted, trained.adapter.modules_to_save)):
        names[peft_name(f"{tied[1]}.weight")] = f"{tied[0]}.weight"
    return names


def in_peft(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A trained tensor as peft has it: all ranks of A of experts ``[E, r, in]`` in one dimension ``[E·r, in]``, those
    of an expert one after the other, and of B ``[E, out, r]`` in ``[out, r·E]``, those of a rank one after the other.
    """
    if name.endswith(LORA_A):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1) if name.endswith(LORA_B) else tensor


def _written(source: TensorSource, dtype: torch.dtype) -> torch.dtype:
    return dtype if source.dtype.is_floating_point else source.dtype


def _require_untied(model: PreTrainedModel, adapted: set[str]) -> None:
    by_tensor: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), set()).add(name)
    for names in by_tensor.values():
        if len(names) > 1 and names & adapted:
            raise RecipeError(
                f"{sorted(names & adapted)[0]} is adapted and tied to {sorted(names - adapted or names)[0]}: "
                "merging would change both",
                hint="keep it by itself: tuner export-hf RUN --adapter keep",
            )
