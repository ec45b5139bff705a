"""What an export holds: every tensor under its published name, with its values' source; nothing is loaded yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from tuner.checkpoint.index import Index
from tuner.errors import DataError, RecipeError
from tuner.export.base import published_rows
from tuner.export.merged import LowRank, MergedRows
from tuner.export.published import Published, converter, published, state_names
from tuner.export.rows import (
    CheckpointRows,
    Conversion,
    ConvertedRows,
    HeldRows,
    OpenFiles,
    RoundedRows,
    Rows,
    read_all,
)
from tuner.export.shards import Output
from tuner.export.source import MODEL_PREFIX, Source
from tuner.export.weights import base_model, frozen_dtype, lora_spec, read_config, some
from tuner.export.write import peft_name, saved_twin
from tuner.model.adapter import ADAPTER, add_lora, lora_layers
from tuner.model.build import build_skeleton
from tuner.model.freeze import freeze


@dataclass(frozen=True)
class Trained:
    """The trained model without its values: on the meta device, as it is published and with its adapter inside.

    ``names`` are the tensors that the checkpoint holds of it, by their names in the model with the adapter.
    """

    plain: PreTrainedModel
    adapted: PreTrainedModel
    names: frozenset[str]


def trained_skeleton(source: Source) -> Trained:
    """Build both and hold them against the checkpoint.

    Raises DataError where the checkpoint lacks a trained tensor, holds another, or one of another shape.
    """
    config = read_config(source)
    plain = build_skeleton(config, torch.float32)
    adapted = plain
    if source.adapter is not None:
        adapted = build_skeleton(config, torch.float32)
        add_lora(adapted, lora_spec(source.adapter), seed=0)
    elif frozen := source.recipe.get("model", {}).get("freeze"):
        adapted = build_skeleton(config, torch.float32)
        freeze(adapted, frozen)
    wanted = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    index = source.checkpoint.index()
    held = {key.removeprefix(MODEL_PREFIX): entry for key, entry in index.items() if key.startswith(MODEL_PREFIX)}
    for problem, names in (("missing", wanted.keys() - held.keys()), ("unexpected", held.keys() - wanted.keys())):
        if names:
            raise DataError(f"{source.checkpoint.path}: model tensors are {problem}: {some(sorted(names))}")
    for name, shape in wanted.items():
        if held[name].shape != shape:
            raise DataError(
                f"{source.checkpoint.path}: {name} has shape {list(held[name].shape)}, the model has {list(shape)}"
            )
    return Trained(plain, adapted, frozenset(wanted))


class Values:
    """Where the values of each of the model's tensors come from: the checkpoint, the base model's files, or both."""

    def __init__(self, source: Source, trained: Trained, files: OpenFiles) -> None:
        self._source, self._trained, self._files = source, trained, files
        self._index: Index = source.checkpoint.index()
        self._adapters: Mapping[str, Callable[[], LowRank]] = {}
        self._base: Mapping[str, Rows] = {}
        self._held: Mapping[str, torch.Tensor] = {}

    def merged(self, dtype: torch.dtype) -> list[Output]:
        """Every published tensor of the plain model, floating ones in ``dtype``.

        Raises RecipeError where one tensor would have to be adapted and not adapted, DataError for the base's files.
        """
        self._adapters = self._low_rank()
        entries = published(self._trained.plain)
        self._find_base([entry for entry in entries if entry.name not in self._trained.names])
        return [output for entry in entries for output in self._of(entry, dtype)]

    def adapter(self, dtype: torch.dtype) -> list[Output]:
        """Every trained tensor of the adapter by peft's name, in ``dtype``."""
        names = {peft_name(name): name for name in sorted(self._trained.names)}
        if twin := saved_twin(self._trained.adapted, lora_spec(self._source.adapter or {})):
            names[peft_name(twin[1])] = twin[0]
        return [Output(target, dtype, self.checkpoint(name)) for target, name in names.items()]

    def checkpoint(self, name: str) -> Rows:
        """A trained tensor of the model with its adapter."""
        key = MODEL_PREFIX + name
        return CheckpointRows(self._files, self._source.checkpoint.path, key, self._index[key])

    def _of(self, entry: Published, dtype: torch.dtype) -> Iterable[Output]:
        if entry.name in self._trained.names:
            rows: Rows | None = self.checkpoint(entry.name)
        elif entry.name in self._held:
            rows = HeldRows(self._held[entry.name])
        else:
            rows = None
        if entry.is_itself:
            [target] = entry.targets
            rows = self._frozen(target, entry.targets[target]) if rows is None else rows
            if entry.name in self._adapters:
                rows = MergedRows(rows, self._adapters[entry.name])
            return [Output(target, _written(rows, dtype), rows)]
        if entry.name in self._adapters:
            raise RecipeError(
                f"{entry.name} is adapted and published as {some(list(entry.targets))}: it cannot be merged",
                hint="export with --adapter keep",
            )
        if rows is None:
            parts = {target: self._frozen(target, shape) for target, shape in entry.targets.items()}
            return [Output(target, _written(part, dtype), part) for target, part in parts.items()]
        kind = _written(rows, dtype)
        conversion = Conversion(RoundedRows(rows, kind), converter(self._trained.plain, entry.name))
        made = {t: ConvertedRows(conversion, t, shape, kind) for t, shape in entry.targets.items()}
        return [Output(target, kind, part) for target, part in made.items()]

    def _frozen(self, target: str, shape: tuple[int, ...]) -> Rows:
        rows = self._base[target]
        if rows.shape != shape:
            raise DataError(f"the base model's {target} has shape {list(rows.shape)}, the model has {list(shape)}")
        return RoundedRows(rows, frozen_dtype(self._source)) if rows.dtype.is_floating_point else rows

    def _find_base(self, entries: list[Published]) -> None:
        """Find what the checkpoint does not hold: in the base model's files, or in the base model, loaded."""
        if not entries:
            return
        facts = self._source.model
        if facts.get("init") != "random":
            found = published_rows(self._files, str(facts["name_or_path"]), facts.get("revision"))
            prefix = f"{self._trained.plain.base_model_prefix}."
            wanted = [target for entry in entries for target in entry.targets]
            names = {target: _known(target, prefix, found) for target in wanted}
            if all(names.values()):
                self._base = {target: found[name] for target, name in names.items() if name}
                return
        state = state_names(base_model(self._source))
        self._held = {entry.name: state[entry.name].detach() for entry in entries}

    def _low_rank(self) -> dict[str, Callable[[], LowRank]]:
        """What reads the adapter of each adapted weight, by the weight's name in the plain model."""
        layers = {f"{name}.weight": (name, layer) for name, layer in lora_layers(self._trained.adapted)}
        if self._source.adapter is not None:
            _require_untied(self._trained.plain, set(layers))
        return {weight: partial(self._read_low_rank, *found) for weight, found in layers.items()}

    def _read_low_rank(self, name: str, layer: Any) -> LowRank:
        length = f"{name}.lora_magnitude_vector.{ADAPTER}.weight"
        return LowRank(
            a=read_all(self.checkpoint(f"{name}.lora_A.{ADAPTER}.weight")).float(),
            b=read_all(self.checkpoint(f"{name}.lora_B.{ADAPTER}.weight")).float(),
            scale=float(layer.scaling[ADAPTER]),
            length=read_all(self.checkpoint(length)).float() if length in self._trained.names else None,
            transposed=bool(layer.fan_in_fan_out),
        )


def total_bytes(outputs: Iterable[Output]) -> int:
    """Bytes of all tensors as they are written."""
    return sum(math.prod(output.rows.shape) * output.dtype.itemsize for output in outputs)


def _written(rows: Rows, dtype: torch.dtype) -> torch.dtype:
    return dtype if rows.dtype.is_floating_point else rows.dtype


def _known(target: str, prefix: str, found: Mapping[str, object]) -> str | None:
    """The tensor's name in the files, which may leave out the name of the decoder or put it in front."""
    for name in (target, target.removeprefix(prefix), prefix + target):
        if name in found:
            return name
    return None


def _require_untied(model: PreTrainedModel, adapted: set[str]) -> None:
    by_tensor: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), set()).add(name)
    for names in by_tensor.values():
        if len(names) > 1 and names & adapted:
            raise RecipeError(
                f"{sorted(names & adapted)[0]} is adapted and tied to {sorted(names - adapted or names)[0]}: "
                "merging would change both",
                hint="export with --adapter keep",
            )
