"""Adapters of peft's by peft's own configs: its layers in the place of linear ones, whose parameters are frozen.

A layer is peft's own, and computes, draws its start and is merged as peft has it. Accepted are kinds whose
parameters are the layers' own and trained: each layer is then a matrix, which can be merged and proven.
"""

import copy
import dataclasses
import difflib
import json
import re
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners._buffer_dict import BufferDict
from pydantic import TypeAdapter, ValidationError
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError, first_line
from tuner.model.adaptable import is_linear, not_adaptable
from tuner.model.adapter import ADAPTER, adapter_layers, saved_modules, train_besides
from tuner.model.build import has_score, is_part
from tuner.model.freeze import Content, content_of
from tuner.runtime.warned import pass_on

KEY = "adapter.config"
_TABLES = json.loads(Path(__file__).with_name("peft_kinds.json").read_text(encoding="utf-8"))
_NOT_TAKEN, _STARTS = (
    {name: why for why, names in _TABLES[key].items() for name in names} for key in ("fields", "init_lora_weights")
)
"""Fields of peft's configs that a recipe does not have, and values of ``init_lora_weights``, each with the reason."""
_NOISE = ("CUDA extension", "boft_n_butterfly_factor to 1")
"""In what peft says of BOFT wherever it has not compiled a kernel, without which it computes the same."""


@dataclasses.dataclass(frozen=True)
class PeftSpec:
    """An adapter by peft's config, its fields by name; ``moves_base`` where its start moves weights of the base."""

    config: Mapping[str, Any]
    moves_base: bool = False

    @property
    def modules_to_save(self) -> Sequence[str]:
        """Modules that are trained in full besides the adapter."""
        return tuple(self.config.get("modules_to_save") or ())

    def peft_config(self, scores: bool = False, base: str | None = None) -> Any:
        """peft's own config. Raises RecipeError with the first flaw."""
        for key, message, hint in flaws(self.config):
            raise RecipeError(f"{key}: {message}", hint=hint)
        kind, fields = _class_of(self.config)
        return kind(**fields, task_type="SEQ_CLS" if scores else "CAUSAL_LM", base_model_name_or_path=base)


def _class_of(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    fields = {name: copy.deepcopy(value) for name, value in config.items() if name not in ("peft_type", "task_type")}
    return PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]], fields


def flaws(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """What of a config peft, or tuner, does not take: the key, what is wrong, and what to write."""
    kind, given = _class_of(config)
    types, clean = typing.get_type_hints(kind), True
    for name, value in given.items():
        key, flaw, hint = f"{KEY}.{name}", None, None
        if name not in types:
            near = difflib.get_close_matches(name, types, 1)
            flaw, hint = f"peft's {kind.__name__} has no such field", f"did you mean {near[0]}?" if near else None
        elif name in _NOT_TAKEN and value and value != "none":
            flaw = f"is not taken: {_NOT_TAKEN[name]}"
        elif name == "init_lora_weights" and (reason := _reason(value)) is not None:
            flaw, hint = f"{value} is not taken: {reason}", "there are true, gaussian, orthogonal, pissa and olora"
        else:
            flaw = _of_another_type(types[name], value)
        if flaw is not None:
            clean = False
            yield key, flaw, hint
    if clean:
        try:
            with warnings.catch_warnings(action="ignore"):
                made = kind(**given)
        except (TypeError, ValueError, ImportError) as error:
            yield KEY, f"peft's {kind.__name__}: {first_line(error)}", None
            return
        if config["peft_type"] == "ADALORA" and made.target_r >= made.init_r:
            yield f"{KEY}.target_r", f"AdaLoRA ends with fewer ranks than the {made.init_r} of init_r", None


def _reason(start: Any) -> str | None:
    if str(start).startswith("pissa_niter"):
        return "peft draws it again when an adapter is loaded"
    return _STARTS.get(str(start))


def _of_another_type(wanted: Any, value: Any) -> str | None:
    try:
        TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        return f"got {value!r}: {error.errors()[0]['msg'].lower()}"
    return None


def add_peft(model: PreTrainedModel, spec: PeftSpec, seed: int) -> None:
    """Put peft's layers into the model, their parameters in float32, and freeze all else but ``modules_to_save``.

    In place. Their start is drawn from ``seed``, in peft's order. On a meta model the new parameters are on meta too.
    Raises RecipeError for what peft does not take, and for layers whose adapter could not be merged or proven.
    """
    if is_part(model):
        raise RecipeError("adapter.kind: peft has no adapters of the language model alone of a multimodal checkpoint")
    on_meta = next(model.parameters()).device.type == "meta"
    saved, config = saved_modules(model, spec.modules_to_save), spec.peft_config(has_score(model))
    own = {name for name, _ in model.named_parameters()}
    before: dict[str, Content] = {}
    config.modules_to_save = None  # peft would put copies next to them
    if hasattr(config, "fan_in_fan_out"):
        config.fan_in_fan_out = any(type(module).__name__ == "Conv1D" for module in model.modules())
    if spec.moves_base and on_meta:
        config.init_lora_weights = True  # the same shapes, of nothing
    elif spec.moves_base:  # what the base is known by is its weights as the files have them
        linear = ((name, module) for name, module in model.named_modules() if is_linear(module))
        before = {name: content_of(module.weight.detach()) for name, module in linear}
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="always", record=True) as told:
            torch.manual_seed(seed)
            PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](model, config, ADAPTER, low_cpu_mem_usage=on_meta)
    except (ValueError, TypeError, NotImplementedError, ImportError, ZeroDivisionError, re.error) as error:
        raise RecipeError(f"{KEY}: {first_line(error)}") from error
    for text in [] if on_meta else [first_line(one.message) for one in told if one.category is UserWarning]:
        if not any(word in text for word in _NOISE):  # such as a size that it took another in the place of
            pass_on(f"{KEY}: {text}")
    _require_adaptable(model, saved)
    for name, layer in adapter_layers(model):
        if "ranknum" in dict(layer.named_children()):  # AdaLoRA's number of ranks, which never changes
            layer.ranknum = BufferDict({ADAPTER: layer.ranknum[ADAPTER].data}, persistent=False)
        if getattr(layer, "module_dropout", {}).get(ADAPTER) == 0:
            layer.module_dropout[ADAPTER] = _Never()
        if name in before:
            layer.get_base_layer().unquantized = before[name]
    _require_own(model, own)
    train_besides(model, saved)
    model.eval()


class _Never:
    """In the place of a share of 0: LoHa and LoKr ask whether a number that they draw is above the share, a number that
    the host would read off a tensor in each layer, and that nobody knows when memory is predicted."""

    def __lt__(self, drawn: torch.Tensor) -> bool:
        return True


def _require_adaptable(model: PreTrainedModel, saved: Sequence[str]) -> None:
    """Check that each layer that peft took is a linear one whose weight is its own and frozen. Raises RecipeError."""
    found, output = adapter_layers(model), model.get_output_embeddings()
    layers = {name: layer.get_base_layer() for name, layer in found}
    bad = {name: "it is no linear layer" for name, layer in layers.items() if not is_linear(layer)}
    bad |= {name: "it is the output layer, which losses take as one matrix" for name, layer in found if layer is output}
    full = tuple(f"{name}." for name in saved)
    bad |= {name: "it is trained in full, by modules_to_save" for name in layers if f"{name}.".startswith(full)}
    bad |= not_adaptable(model, {name: layer for name, layer in layers.items() if name not in bad})
    for name, why in bad.items():
        good = sorted({name.rpartition(".")[2] for name in layers} - {name.rpartition(".")[2] for name in bad})
        others = f"; {', '.join(good)} can be" if good else ""
        raise RecipeError(f"{KEY}.target_modules: {name} cannot be adapted: {why}{others}")


def _require_own(model: PreTrainedModel, before: set[str]) -> None:
    """Check that all that peft trains is new, and all that is new is trained. Raises RecipeError."""
    for name, parameter in model.named_parameters():
        is_new = name.replace(".base_layer.", ".") not in before
        if is_new != parameter.requires_grad:
            what = "is frozen, and checkpoints would not hold it" if is_new else "is the base's, and would be trained"
            raise RecipeError(f"{KEY}: {name} {what}")


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and biases of the adapted layers with their adapters, as peft merges them, by name without an adapter.

    In place: of the model nothing is left to train.
    """
    found: dict[str, torch.Tensor] = {}
    for name, layer in adapter_layers(model):
        layer.merge()
        found |= {f"{name}.{last}": one.data for last, one in layer.get_base_layer().named_parameters(recurse=False)}
    return found


ROWS_AT_ONCE = 1024


@torch.no_grad()
def applied_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same in float64, and not merged: what each layer makes of the rows of a unit matrix, and of zeros."""
    for name, layer in adapter_layers(model):
        exact = copy.deepcopy(layer).double().eval()
        base = exact.get_base_layer()
        is_turned = type(base).__name__ == "Conv1D"  # its weight is [in, out]
        size = base.weight.shape[0 if is_turned else 1]
        bias = exact(torch.zeros(1, size, dtype=torch.float64))
        units = torch.eye(size, dtype=torch.float64).split(ROWS_AT_ONCE)
        weight = torch.cat([exact(rows) - bias for rows in units])
        yield f"{name}.weight", weight if is_turned else weight.T
        if base.bias is not None:
            yield f"{name}.bias", bias[0]
