"""The trained model in memory: the checkpoint's tensors in a transformers model on the CPU, without a process group.

What training left as it was are the base model's tensors as training held them. They are read from its published
safetensors files, which are located and never loaded whole; weights of a base that was quantised become codes and
scales and return, a few rows at a time.
"""

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from tuner.checkpoint import storage
from tuner.checkpoint.load import read_tensors
from tuner.config.methods import Head
from tuner.config.recipe import Adapter, ModelSection
from tuner.errors import DataError, first_line
from tuner.export import tensors
from tuner.export.source import ExportSource
from tuner.export.tensors import OpenFiles, TensorSource, made_tensor, mapped_tensor
from tuner.init_from.give import give_frozen
from tuner.init_from.sources import pinned, versions_in
from tuner.init_from.target import target_of
from tuner.model import transformers_private
from tuner.model.build import ModelSpec, auto_model, build_model, is_part, meta_model
from tuner.model.freeze import Content, content_of, hash_of_frozen, select
from tuner.model.multimodal import names_in_files
from tuner.model.own_class import register
from tuner.model.quantize.codes import Kind, Quantized, dequantize, quantize
from tuner.model.quantize.layers import PublishedCodes, QuantizeSpec, quantizable, quantized_layers
from tuner.model.quantize.published import dequantized_as_stored, read
from tuner.model.stored import Published, assembled, published, state_names, stored_tensors, weights_directory
from tuner.model.tokens import resize_embeddings
from tuner.model.trainable import TrainableSpec, spec_of
from tuner.model.vetting import holds_codes, vet_config, vet_weights
from tuner.rundir.checkpoints import require_same_base, require_same_quantizer
from tuner.rundir.layout import MODEL_CONFIG


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
    if (spec := quantize_spec(source)) is None:
        return None
    require_same_quantizer(source.checkpoint, spec.facts())
    return base_of_kind(spec.kind, plain, spec.kept, published_codes(source))


def quantize_spec(source: ExportSource) -> QuantizeSpec | None:
    """How a run's base was quantised. Raises DataError for a way that is not known."""
    if source.quantize == "none":
        return None
    return QuantizeSpec(_known(source.quantize), tuple((source.adapter or {}).get("modules_to_save", ())))


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
        plain.weight = nn.Parameter(layer.weight, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    return model


def _known(kind: str) -> Kind:
    if kind not in get_args(Kind):
        raise DataError(f"the base was quantised to {kind}, which this version does not know")
    return cast(Kind, kind)


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
        for name, *found in zip(names, *held, strict=True):
            values = [tensor for _, tensor in found]
            trained[name].data.copy_(tensors.mean_of(values) if source.averaged else values[0])
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
    chosen = select(source.keep_fp32, state_names(plain), "--keep-fp32")
    return {*transformers_private.kept_in_float32(plain), *chosen}


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
        name_or_path=source.name_or_path, revision=source.revision, random_init=source.is_random,
        config_overrides=source.model_section.get("config", {}), new_ids=source.new_ids, head=source.head,
        quantize=how if is_coded else None,
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


class Frozen:
    """The model's tensors before training in the type in which training held them.

    They are read where they lie in the base model's files. Where these do not hold them (random weights) the model is
    built, in memory.
    """

    def __init__(
        self, source: ExportSource, plain: PreTrainedModel, files: OpenFiles, entries: Sequence[Published],
        base: QuantizedBase | None = None,
    ) -> None:
        """Find them; none is read. With ``base`` they are what training computed with, where it quantised them.

        Raises DataError for files that are damaged or absent.
        """
        self._plain, self._dtype, self._new_ids, self._base = plain, frozen_dtype(source), source.new_ids, base
        self._files: Mapping[str, TensorSource] = {}
        self._names: Mapping[str, str] = {}
        self._held: Mapping[str, torch.Tensor] = {}
        if not entries:
            return
        if not source.is_random and not source.given_frozen:
            found = published_tensors(files, source.name_or_path, source.revision)
            wanted = [target for entry in entries for target in entry.targets]
            names = _in_files(plain, wanted, found)
            if all(names.values()):
                self._names = {target: name for target, name in names.items() if name}
                self._files = {target: found[name] for target, name in self._names.items()}
                return
        state = state_names(base_model(source))
        if missing := [entry.name for entry in entries if entry.name not in state]:
            raise DataError(
                f"the base model changed since {source.checkpoint.path} was saved: it has no {some(missing)}",
                hint="restore it, or name its commit: model.revision",
            )
        self._held = {entry.name: state[entry.name].detach() for entry in entries}

    def tensor(self, entry: Published) -> TensorSource | None:
        """The tensor; None where the files hold it in parts or in another layout."""
        if entry.name in self._held:
            held = tensors.held_tensor(self._held[entry.name])
            return held if self._base is None or self._base.codes is not None else self._as_trained(entry, held)
        return self._as_trained(entry, next(iter(self.parts(entry).values()))) if entry.is_itself else None

    def parts(self, entry: Published) -> dict[str, TensorSource]:
        """What the files hold of it, by published name. Raises DataError for one of another shape than the model's."""
        return {target: self._part(entry.name, target, shape) for target, shape in entry.targets.items()}

    def assembled(self, entry: Published) -> TensorSource:
        """The tensor, made in memory of what the files hold of it."""
        parts = {target: part.whole() for target, part in self.parts(entry).items()}
        return self._as_trained(entry, tensors.held_tensor(assembled(self._plain, entry.name, parts)))

    def later(self, entry: Published) -> TensorSource:
        """The same, made when it is first read and dropped after its last slice."""
        shape = tuple(state_names(self._plain)[entry.name].shape)
        dtype = torch.float32 if self.is_quantized(entry) else next(iter(self.parts(entry).values())).dtype
        return tensors.made_tensor(shape, dtype, lambda: self.assembled(entry).whole())

    def is_quantized(self, entry: Published) -> bool:
        """Whether training computed with other values than the files hold, which are made of the whole tensor."""
        return self._base is not None and entry.name in self._base.names

    def _as_trained(self, entry: Published, held: TensorSource) -> TensorSource:
        return held if self._base is None else self._base.tensor(entry.name, held)

    def sha256(self, entry: Published) -> tuple[torch.dtype, tuple[int, ...], str]:
        """Type, shape and SHA-256 of the tensor's bytes, read a block at a time where it is in one piece."""
        source = self.tensor(entry) or self.assembled(entry)
        digest = hashlib.sha256()
        for block in source.blocks(source.dtype):
            digest.update(storage.tensor_bytes(block))
        return source.dtype, source.shape, digest.hexdigest()

    def codes(self, entry: Published) -> dict[str, Content]:
        """What stands for a weight in the hash of the base where files hold its codes alone; else nothing."""
        (target, *others) = entry.targets
        if others or self._base is None or self._base.codes is None or entry.name not in self._base.names:
            return {}
        name = self._names[target]
        return self._base.contents(name, entry.name.removesuffix(".weight")) if self._base.codes.is_part(name) else {}

    def _part(self, name: str, target: str, shape: tuple[int, ...]) -> TensorSource:
        found = self._files[target]
        coded = None if self._base is None else self._base.stored(self._names[target], name, shape, self._dtype)
        if coded is not None:
            return coded
        grows = shape and found.shape and shape[1:] == found.shape[1:]  # a scalar has no rows
        if grows and self._new_ids.start <= found.shape[0] < shape[0] == self._new_ids.stop:
            found = tensors.grown_tensor(found, shape[0])
        if found.shape != shape:
            raise DataError(f"the base model's {target} has shape {list(found.shape)}, the model has {list(shape)}")
        return tensors.rounded_tensor(found, self._dtype) if found.dtype.is_floating_point else found


def require_same_frozen(source: ExportSource, plain: PreTrainedModel, names: Collection[str], files: OpenFiles) -> None:
    """Read the tensors of these names, which were not trained, and check their hash.

    It is that of :func:`tuner.model.freeze.hash_of_frozen`. Raises DataError where the base model is another one now.
    """
    entries = [entry for entry in published(plain) if entry.name in names] if names else []
    base = quantized_base(source, plain)
    frozen = Frozen(source, plain, files, entries, base if base is not None and base.codes is not None else None)
    stored = {entry.name: found for entry in entries if (found := frozen.codes(entry))}
    entries = [entry for entry in entries if entry.name not in stored]
    whole = [entry for entry in entries if frozen.tensor(entry) is not None]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        contents = dict(zip([entry.name for entry in whole], pool.map(frozen.sha256, whole), strict=True))
    contents |= {entry.name: frozen.sha256(entry) for entry in entries if entry.name not in contents}
    contents |= {name: content for found in stored.values() for name, content in found.items()}
    require_same_base(source.checkpoint, hash_of_frozen(contents))


def _in_files(plain: PreTrainedModel, targets: Iterable[str], found: Mapping[str, object]) -> dict[str, str | None]:
    """What the files call each published tensor, with the name of the decoder or without; None where they lack it."""
    if is_part(plain):
        return names_in_files(plain, targets, found)
    prefix = f"{plain.base_model_prefix}."
    spelled = {target: (target, target.removeprefix(prefix), prefix + target) for target in targets}
    return {target: next((name for name in names if name in found), None) for target, names in spelled.items()}


def published_tensors(files: OpenFiles, name_or_path: str, revision: str | None) -> dict[str, TensorSource]:
    """Every tensor of a local directory's or a hub model's safetensors files, by its name there.

    Empty where the model has no such files. Raises DataError for a file that is damaged or absent.
    """
    found = {}
    for name, stored in stored_tensors(weights_directory(name_or_path, revision)).items():
        if stored.dtype not in storage.DTYPES:
            raise DataError(f"{stored.file}: its header cannot be read: {stored.dtype} is no type of weights")
        found[name] = tensors.file_tensor(files, stored.file, stored.start, stored.shape, storage.DTYPES[stored.dtype])
    return found
