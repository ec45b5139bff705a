"""Every name of transformers that it does not promise and this package uses, each looked up when it is used.

Where transformers lost one, what needs it says so. A contract test finds such names anywhere else.
"""

import copy
import inspect
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from tuner.runtime.torch_private import Need, listed_name, private_attribute

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_NEEDS = {key: Need(row["by"], row["still_works"]) for key, row in _TABLE.items()}
NAMES = {name: (path, _NEEDS[key]) for key, row in _TABLE.items() for name, path in row.get("names", {}).items()}
"""By the name here: where transformers has it, what needs it, and what works without."""


_MASK_OF_POSITIONS = re.compile(r"create_\w*mask\w*\((?:(?!\n *\)).)*?\bposition_ids=position_ids\b", re.DOTALL)


_here: Any = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """One of ``NAMES``. Raises MachineError where this transformers has it no more."""
    return listed_name(NAMES, name)


def load_published(model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Load tensors of published files into a model, laid out as it wants them; the loader's report."""
    conversions = getattr(model, "_weight_conversions", None)
    settings = _here.LoadStateDictConfig(dtype=dtype, weight_mapping=_here.conversion_mapping(model))
    try:
        return _here.load_converted(model, tensors, settings)[0]
    finally:
        model._weight_conversions = conversions  # type: ignore[assignment]  # it noted those that it used alone


class FilePlace(NamedTuple):
    """Where the loader puts a tensor of published files: its name after renaming alone, and its place in the model."""

    renamed: str
    key: str


def file_places(model: PreTrainedModel, names: Iterable[str]) -> dict[str, FilePlace]:
    """What the loader makes of names in published files, whichever of several spellings these have.

    Names of one tensor in two spellings are the same once renamed. The key of a tensor that several are made of is that
    of all of them.
    """
    mapping = _here.conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, _here.WeightRenaming)]
    converters = [each for each in mapping if not isinstance(each, _here.WeightRenaming)]
    prefix, state = model.base_model_prefix, model.state_dict()
    found = {}
    for name in names:
        key = _here.rename_source_key(name, renamings, converters, prefix, state)[0]
        renamed = _here.rename_source_key(name, renamings, [])[0]
        if key not in state and name in state:  # as the loader has it: it is a name of the model already
            key = renamed = name
        found[name] = FilePlace(renamed.removeprefix(f"{prefix}."), key)
    return found


def forget_renaming(model: PreTrainedModel, target: str) -> None:
    """Have a loaded model not note that tensors of its files were renamed to ``target``: publishing it would undo it.

    Raises MachineError where a model does not note what was done to its files' names.
    """
    noted = private_attribute(model, "_weight_conversions", _NEEDS["export"])
    model._weight_conversions = [each for each in noted if target not in each.target_patterns]  # type: ignore[assignment]


class WeightReader(Protocol):
    """What is given the weights of a model's files one by one, in place of the model."""

    def begin(self, model: PreTrainedModel) -> None:
        """See the model before anything is read: it is on the meta device."""

    def wants(self, name: str) -> bool:
        """Whether it is to be given a tensor of the model."""

    def take(self, model: PreTrainedModel, name: str, weight: torch.Tensor, source: str | None) -> torch.Tensor | None:
        """Take a weight, called ``source`` in the files where it is one there; what goes into the model all the same.

        An error that it raises ends the loading in a report that does not say its hint: see :meth:`end`.
        """

    def end(self) -> None:
        """All is read. What it raises is raised."""

    def knows(self, name: str) -> bool:
        """Whether a tensor of the files that is none of the model's belongs to it."""


def options_to_read(reader: WeightReader) -> dict[str, Any]:
    """The arguments of `from_pretrained` by which a reader is given weights, each read when the last one is done."""
    return {"quantization_config": _reading_config()(reader)}


@cache
def _reading_config() -> Any:
    """The class of a config by which transformers finds what it takes for a quantiser; nothing of it stays."""

    class ReadingConfig(_here.QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, reader: WeightReader) -> None:
            self.quant_method: Any = "tuner"
            self.reader = reader

    @_here.register_quantizer("tuner")
    class Reading(_here.HfQuantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
            self.quantization_config.reader.begin(model)

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
            return bool(self.quantization_config.reader.wants(param_name))

        def get_quantize_ops(self) -> Any:
            return self

        def convert(self, tensors: dict[str, Any], *, model: Any, missing_keys: set[str], **about: Any) -> Any:
            left: dict[str, Any] = {}
            sources: Any = about.get("source_patterns") or ()
            for name, found in tensors.items():
                weight = found[0] if isinstance(found, list) else found
                source = sources[0] if len(sources) == 1 else None
                kept = self.quantization_config.reader.take(model, name, weight, source)
                missing_keys.discard(name)
                if kept is not None:
                    left[name] = kept
            return left

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
            self.quantization_config.reader.end()
            self.remove_quantization_config(model)
            for module in model.modules():
                if isinstance(module, PreTrainedModel):
                    vars(module.config).pop("_is_quantized", None)

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return ReadingConfig


def new_of_class(kind: type[PreTrainedModel], /, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A new model of a class."""
    made: PreTrainedModel = private_attribute(kind, "_from_config", _NEEDS["building"])(config, **options)
    return made


def attention_of(config: PretrainedConfig) -> str:
    """The name of the attention that a model of this config computes with."""
    found: str = private_attribute(config.get_text_config(), "_attn_implementation", _NEEDS["building"])
    return found


def forget_attention(config: PretrainedConfig) -> None:
    """Have each class choose its attention."""
    config._attn_implementation = None


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of the config in which each class chooses its attention, as for someone who only loads the model."""
    plain = copy.deepcopy(config)
    forget_attention(plain)
    return plain


def takes_our_attention(config: PretrainedConfig) -> bool:
    """Whether the class of a config computes attention through transformers' interface.

    The others have attention of their own, and keep it: what the config names as implementation never reaches their
    layers, but it decides whether they are given a causal mask. So do those that choose keys by content inside of that
    mask (Doge): they need it, and hand on what they made of it.
    """
    kinds = _classes(config)
    takes = all(private_attribute(each, "_can_set_attn_implementation", _NEEDS["building"])() for each in kinds)
    parts = (part for each in kinds for part in vars(sys.modules[each.__module__]).values())
    return takes and not any(hasattr(part, "prepare_dynamic_mask") for part in parts)  # a mask in the causal one


def has_sinks(config: PretrainedConfig) -> bool:
    """Whether layers of the class of a config give attention a learned sink for each head."""
    return any("s_aux=" in inspect.getsource(sys.modules[kind.__module__]) for kind in _classes(config))


def _classes(config: PretrainedConfig) -> list[type[nn.Module]]:
    """The classes of a config; of a multimodal model its language model's, whatever attends to pictures."""
    text = config.get_text_config()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is not config:
        kind = MODEL_MAPPING.get(type(text), kind)
    return [each for each in (kind if isinstance(kind, tuple) else (kind,)) if each is not None]


def registered(interface: Any) -> dict[str, Any]:
    """What all models find in one of transformers' interfaces, by name; a change is a change for all."""
    found: dict[str, Any] = private_attribute(interface, "_global_mapping", _NEEDS["building"])
    return found


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether layers of a model carry something else from token to token than keys and values.

    By what its class notes for generation, or by kinds of layers in its config: `linear_attention`, `conv`, `hybrid`.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    stateful = bool(private_attribute(type(model), "_is_stateful", _NEEDS["building"]))
    return stateful or any("linear" in kind or "attention" not in kind for kind in kinds)


def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether `generate` gives a model a DynamicCache; the others make a cache or state of their own."""
    return bool(private_attribute(type(model), "_supports_default_dynamic_cache", _NEEDS["samples"])())


def decoder_classes(model: PreTrainedModel) -> set[str]:
    """Names of the classes of a model's decoder layers, as transformers notes them for sharding."""
    return set(private_attribute(model, "_no_split_modules", _NEEDS["building"]) or ())


def kept_in_float32(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name, that a class keeps in float32 next to weights of 16 bits, whatever they are."""
    parts = sorted(private_attribute(model, "_keep_in_fp32_modules_strict", _NEEDS["building"]) or ())
    state = model.state_dict(keep_vars=True) if parts else {}
    found = re.compile("|".join(part.replace("*", ".*") for part in parts))
    return {name: tensor for name, tensor in state.items() if found.search(name)}


def compute_buffers(model: PreTrainedModel, module: nn.Module) -> None:
    """Compute a module's constants as its class does when it is made; its parameters stay as they are."""
    for parameter in module.parameters(recurse=False):
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    private_attribute(model, "_init_weights", _NEEDS["building"])(module)


def keep_as_made(module: nn.Module) -> None:
    """Have the loader draw nothing for a module's own tensors where files have none of them."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def commit_of(config: PretrainedConfig) -> str | None:
    """The commit on the hub that a config came from; None of a local one."""
    return getattr(config, "_commit_hash", None)


def computes_in_groups(experts: nn.Module) -> bool:
    """Whether a module of routed experts multiplies by those of all rows at once, and not by one after the other."""
    return bool(private_attribute(experts.config, "_experts_implementation", _NEEDS["experts"]) != "eager")


def apply_gate(experts: nn.Module, projected: torch.Tensor) -> torch.Tensor:
    """What a module of gated experts makes of the rows ``[N, 2·I]`` of its first projection: ``[N, I]``."""
    gated: torch.Tensor = private_attribute(experts, "_apply_gate", _NEEDS["experts"])(projected)
    return gated


def masks_by_position(decoder: nn.Module) -> bool:
    """Whether a class with attention of its own makes its mask of the positions it is given: a restart is a document.

    Read in the source of its models, as transformers reads there whether attention can be set.
    """
    files = {type(module).__module__ for module in decoder.modules() if isinstance(module, PreTrainedModel)}
    return any(_MASK_OF_POSITIONS.search(inspect.getsource(sys.modules[file])) for file in files)


@dataclass(frozen=True)
class Recorded:
    """What transformers notes of a module's result by a hook: under which key, and which part of a tuple."""

    key: str
    index: int

    def of(self, output: Any) -> Any:
        """That part of a module's result."""
        return output[self.index] if isinstance(output, tuple) else output


def take_recorders(module: nn.Module) -> list[Recorded]:
    """Take away the hooks of a module by which transformers notes results; what they noted."""
    made_by, found = f"{_here.recorder.__qualname__}.<locals>.", []
    for number, hook in list(module._forward_hooks.items()):
        if getattr(hook, "__qualname__", "").startswith(made_by):
            held = inspect.getclosurevars(hook).nonlocals
            found.append(Recorded(held["key"], held["index"]))
            del module._forward_hooks[number]
    return found


def note_recorded(key: str, value: Any) -> None:
    """Note a module's result as its hook would: where the forward that runs was asked for results of that key."""
    if (noted := _here.active_record.get()) is not None and key in noted and value is not None:
        noted[key].append(value)


def own_attention(model: PreTrainedModel) -> str:
    """The name of the attention that a model's class chooses for itself."""
    with torch.device("meta"):
        return attention_of(new_of_class(type(model), plain_config(model.config), dtype=model.dtype).config)
