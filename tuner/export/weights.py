"""The trained model in memory: the checkpoint's tensors in a transformers model on the CPU, without a process group."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from tuner.checkpoint.load import read_tensors
from tuner.config.methods import Head
from tuner.config.recipe import Adapter, ModelSection
from tuner.errors import DataError, first_line
from tuner.export.quantized import published_codes, quantize_spec, quantized_base, with_weights
from tuner.export.source import ExportSource
from tuner.export.tensors import mean_of
from tuner.init_from.give import give_frozen
from tuner.init_from.sources import pinned, versions_in
from tuner.init_from.target import target_of
from tuner.model import transformers_private
from tuner.model.build import ModelSpec, auto_model, build_model, meta_model
from tuner.model.freeze import select
from tuner.model.own_class import register
from tuner.model.quantize.layers import ReadingQuantizer
from tuner.model.stored import state_names
from tuner.model.tokens import resize_embeddings
from tuner.model.trainable import TrainableSpec, spec_of
from tuner.model.transformers_private import kept_in_float32
from tuner.model.vetting import vet_config, vet_weights
from tuner.rundir.layout import MODEL_CONFIG

_ADAPTER: TypeAdapter[Adapter] = TypeAdapter(Adapter)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_trained(source: ExportSource) -> PreTrainedModel:
    """A model in float32 that computes what the trained one computes, with the adapter inside it where there is one.

    Every trained parameter comes from the checkpoint, frozen ones from the base model.

    Raises DataError where a trained parameter is missing, unexpected or of another shape.
    """
    choice = trainable_spec_of(source)
    if choice.adapter is not None:
        model = _quantized(source, base_model(source))
    else:
        model = plain_model(read_config(source), source.head)
        parameters = list(model.parameters())
        left = not all(parameter.requires_grad for parameter in parameters)  # by its class
        if choice.frozen or left or len(state_names(model)) > len(parameters):  # or buffers that files hold
            _copy_base(model, base_model(source))
    choice.apply(model, seed=0)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    require_tensors(source, {name: tuple(parameter.shape) for name, parameter in trained.items()})
    with torch.no_grad():
        names = sorted(trained)
        keys = [source.prefix + name for name in names]
        held = [read_tensors(info, keys) for info in source.checkpoints]
        for name, *tensors in zip(names, *held, strict=True):
            values = [tensor for _, tensor in tensors]
            trained[name].data.copy_(mean_of(values) if source.averaged else values[0])
    return _widened(model)


def require_tensors(source: ExportSource, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError unless each checkpoint's model tensors are these, by their names in the model, of these shapes.
    """
    prefix = source.prefix
    for info in source.checkpoints:
        held = {key.removeprefix(prefix): entry for key, entry in info.index().items() if key.startswith(prefix)}
        for problem, names in (("missing", wanted.keys() - held.keys()), ("unexpected", held.keys() - wanted.keys())):
            if names:
                raise DataError(f"{info.path}: model tensors are {problem}: {some(sorted(names))}")
        for name, shape in wanted.items():
            if held[name].shape != shape:
                raise DataError(f"{info.path}: {name} has shape {list(held[name].shape)}, the model has {list(shape)}")


def trainable_spec_of(source: ExportSource) -> TrainableSpec:
    """Which parameters the run trained: its adapter's facts are those of the recipe's section. Raises DataError."""
    try:
        spec = spec_of(_ADAPTER.validate_python(dict(source.adapter or {})))
    except ValueError as error:
        raise DataError(f"{source.path}: its adapter's facts are not an adapter's: {first_line(error)}") from error
    return TrainableSpec(spec, source.model_section.get("freeze") or (), source.new_ids)


def read_config(source: ExportSource) -> PretrainedConfig:
    """The model's config as the run saved it, with the key-value cache on again. Raises DataError."""
    if (use := source.model_section.get("use")) is not None:
        register(str(use))
    config = config_in(source.run_dir / MODEL_CONFIG)
    config.use_cache = True
    return config


def config_in(directory: Path) -> PretrainedConfig:
    """The model's config in a directory. Raises DataError."""
    auto: Any = AutoConfig
    try:
        config: PretrainedConfig = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{directory}: no readable model config: {first_line(error)}") from error
    return config


def exact_names(source: ExportSource, plain: PreTrainedModel) -> set[str]:
    """Weights that are written in float32: those that the class reads so, as transformers saves it, and chosen ones.

    Raises RecipeError for a name or glob that means none.
    """
    return set(kept_in_float32(plain)) | set(select(source.keep_fp32, state_names(plain), "--keep-fp32"))


def plain_model(config: PretrainedConfig, head: Head) -> PreTrainedModel:
    """A float32 model of this config with stock attention, whose parameters are allocated and hold nothing yet."""
    with transformers_private.no_init_weights():
        model: PreTrainedModel = auto_model(head, config).from_config(copy.deepcopy(config), dtype=torch.float32)
    model.tie_weights()
    model.train(False)
    return model


def frozen_dtype(source: ExportSource) -> torch.dtype:
    """Type in which frozen base weights were held in training, as the checkpoint recorded it."""
    return DTYPES.get(str(source.model_section.get("dtype")), torch.float32)


@torch.no_grad()
def plain_base(source: ExportSource) -> PreTrainedModel:
    """The base model as transformers loads it, rounded to the type in which training held it, then widened to float32.

    What training quantised is quantised and turned back. Where no directory holds the base as it was trained (random
    weights, changed config, codes alone) it is built as the run did.
    """
    is_as_published = not (source.is_random or source.model_section.get("config") or source.given_frozen)
    if is_as_published and (source.quantize == "none" or published_codes(source) is None):
        name, revision = source.name_or_path, source.revision
        vet_config(name, revision)
        vet_weights(name, revision)
        labels = {"num_labels": 1} if source.head == "score" else {}
        base: PreTrainedModel = auto_model(source.head, read_config(source), whole=True).from_pretrained(
            name, revision=revision, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **labels
        )
        for tensor in state_names(base).values():  # what it computes itself (Gemma's scale) is not rounded
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(frozen_dtype(source))
        resize_embeddings(base, read_config(source).get_text_config().vocab_size)
        return _widened(_quantized(source, base))
    plain = plain_model(read_config(source), source.head)
    _copy_base(plain, base_model(source))
    return _quantized(source, plain)


def _quantized(source: ExportSource, model: PreTrainedModel) -> PreTrainedModel:
    """A model with what a quantised run computed with, in float32, in place of its base's weights."""
    if source.quantize != "none":
        part = meta_model(read_config(source), torch.float32, source.head)  # of a whole, what was trained
        base = quantized_base(source, part)
        if base is not None and base.codes is None:
            base.apply(_widened(model), frozen_dtype(source))
    return model


def base_model(source: ExportSource) -> PreTrainedModel:
    """The model before training, loaded in the type in which training held it, and not quantised.

    Of files that hold codes alone, what these stand for, in float32.
    """
    how = quantize_spec(source)
    is_coded = how is not None and published_codes(source) is not None
    spec = ModelSpec(
        name_or_path=source.name_or_path,
        revision=source.revision,
        random_init=source.is_random,
        config_overrides=source.model_section.get("config", {}),
        new_ids=source.new_ids,
        head=source.head,
        quantize=ReadingQuantizer(how) if is_coded and how else None,
    )
    model = build_model(spec, frozen_dtype(source), int(source.recipe.get("seed", 42)))
    if source.given_frozen:
        _give_frozen(source, model)
    return with_weights(model) if is_coded else model


def _give_frozen(source: ExportSource, model: PreTrainedModel) -> None:
    """Give a base what the run's `model.init_from` gave those of its weights that were not trained."""
    section, trainable, config = ModelSection(**source.model_section), trainable_spec_of(source), read_config(source)
    plain, adapted = (meta_model(config, torch.float32, source.head) for _ in range(2))
    trainable.apply(adapted, seed=0)
    entries = pinned(section.init_from, versions_in(source.meta["init_from"]))
    give_frozen(entries, target_of(plain, adapted, trainable), model)


def _copy_base(model: nn.Module, base: nn.Module) -> None:
    """Fill parameters and persistent buffers with the base model's."""
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in state_names(base).items():
        targets[name].data.copy_(tensor)


@torch.no_grad()
def _widened(model: PreTrainedModel) -> PreTrainedModel:
    for tensor in state_names(model).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    model.train(False)
    return model


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
