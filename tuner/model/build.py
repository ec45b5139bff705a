"""Build a transformers language model: its config, its weights from files or from a seed, its blocks."""

import contextlib
import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from tuner.config.methods import Head
from tuner.errors import DataError, MachineError, RecipeError, is_out_of_memory
from tuner.model import attention
from tuner.model import transformers_private as private
from tuner.model.attention import tell_attention
from tuner.model.stored import index_names, stored_in
from tuner.model.tokens import resize_embeddings, resize_vocabulary
from tuner.model.vetting import QUANTIZATION, broken_weights, vet_config, vet_weights, weight_files

if TYPE_CHECKING:
    from tuner.model.quantize.codes import Kind
    from tuner.model.unread import UnreadWeights

_HALF = (torch.bfloat16, torch.float16)
_RANDOM = ("pdrop", "layerdrop", "drop_path_rate", "jitter_noise")
"""What else than dropout draws in training, by the ends of keys."""
_UNTRAINED = re.compile(r"requires_grad(?: ?= ?|_\()False")
"""How a class says that it does not train a parameter."""


class BaseQuantizer(Protocol):
    """What quantises linear layers of a base (:class:`~tuner.model.quantize.layers.QuantizeSpec`)."""

    @property
    def kind(self) -> "Kind":
        """What weights become."""

    def reader(self, name_or_path: str, revision: str | None) -> private.WeightReader:
        """What is given the weights of a model's files one by one."""

    def finish(self, model: PreTrainedModel) -> None:
        """Quantise what is not yet, in place."""


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build: a hub name or local directory, and what to change in its config."""

    name_or_path: str
    revision: str | None = None
    random_init: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    new_ids: range = range(0)
    """Of tokens that were added to the model's own."""
    without_dropout: bool = False
    """Whether shares of dropout in the config are made zero, whatever it says."""
    head: Head = "tokens"
    quantize: BaseQuantizer | None = None
    """Whether linear layers are quantised while their weights are read."""
    unread: "UnreadWeights | None" = None
    """Takes note of fused weights that may stay in the files, where the values are only to be handed on."""


def model_config(spec: ModelSpec) -> PretrainedConfig:
    """The config of the model, grown by new tokens. Raises RecipeError for an unknown model, type or overridden key."""
    config = _own_config(spec)
    resize_vocabulary(config, spec.new_ids)
    return config


def _own_config(spec: ModelSpec) -> PretrainedConfig:
    with _clear_errors(spec):
        vet_config(spec.name_or_path, spec.revision, None if spec.quantize is None else spec.quantize.kind)
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            spec.name_or_path, revision=spec.revision, trust_remote_code=False
        )
    vars(config).pop(QUANTIZATION, None)  # of files that are read as codes: the model says nothing of it
    try:
        text = config.get_text_config()
    except ValueError as error:  # of several models
        raise RecipeError(
            f"model.name_or_path: {config.model_type} has no text model of its own: {_reason(error)}",
            hint="choose a causal language model",
        ) from error
    if text is config:
        config = _overridden(spec, config)
    else:
        from tuner.model.multimodal import config_of_language_model

        config = config_of_language_model(config, spec.head, spec.random_init, partial(_overridden, spec))
    if spec.without_dropout:
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            for key in dropouts_of(part):
                setattr(part, key, 0.0)
    config.use_cache = False
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0  # RWKV's, for float16: in evaluation it divides its weights in place, the twin's too
    private.forget_attention(config)  # what the file names is for whoever wrote it
    if spec.head == "score":
        from tuner.model.score import require_scores

        require_scores(config)
    return config


def _overridden(spec: ModelSpec, config: PretrainedConfig) -> PretrainedConfig:
    """The config with the recipe's values in place of its own. Raises RecipeError."""
    for key, value in spec.config_overrides.items():
        if not hasattr(config, key):
            near = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            raise RecipeError(
                f"model.config.{key}: the config of {spec.name_or_path} ({config.model_type}) has no such key",
                hint=f"did you mean {near[0]}?" if near else None,
            )
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise RecipeError(
                f"model.config.{key}: {value} cannot be recorded: {_reason(error)}",
                hint='write the number into the model\'s config.json, as {"__float__": "Infinity"}',
            ) from error
    if not spec.config_overrides:
        return config
    changed = {**config.to_dict(), **spec.config_overrides} | _following(config, spec.config_overrides)
    if "num_hidden_layers" in spec.config_overrides:
        changed.pop("layer_types", None)
    try:
        return type(config).from_dict(changed)
    except Exception as error:  # configs validate themselves, each with exceptions of its own
        raise RecipeError(f"model.config: {_reason(error)}", hint="these values do not go together") from error


def _following(config: PretrainedConfig, given: Mapping[str, Any]) -> dict[str, int]:
    """What of a config followed from its other numbers, and follows from the ``given`` ones: its classes keep it.

    The width of a head, where it was hidden_size / num_attention_heads, and as many key heads as heads.
    """
    names = type(config).attribute_map
    named = {names.get(key, key): value for key, value in given.items()}

    def following(changed: Mapping[str, Any]) -> dict[str, int]:
        sizes = ("hidden_size", "num_attention_heads")
        hidden, heads = (changed.get(names.get(key, key), getattr(config, key, None)) for key in sizes)
        if not isinstance(heads, int) or heads < 1:
            return {}
        divides = isinstance(hidden, int) and hidden > 0 and hidden % heads == 0
        return {"num_key_value_heads": heads} | ({"head_dim": hidden // heads} if divides else {})

    was, now = following({}), following(named)
    kept = [key for key in was if names.get(key, key) not in named and getattr(config, key, None) == was[key]]
    return {names.get(key, key): now[key] for key in kept if now.get(key, was[key]) != was[key]}


def dropouts_of(config: PretrainedConfig) -> dict[str, float]:
    """The config's shares of what is left out at random in training, by key: dropout, and noise of a router."""
    text = config.get_text_config()
    values = {**config.to_dict(), **text.to_dict()}
    named = {key: value for key, value in values.items() if key.endswith(_RANDOM) or "dropout" in key}
    return {key: float(value) for key, value in named.items() if type(value) is float and value > 0}


def build_model(spec: ModelSpec, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Build the model on the CPU with packed attention where its class takes it, in evaluation mode.

    Weights are read by transformers straight into the tensors of a model built on the meta device, with its conversion
    of file names to module names; with ``random_init`` they are drawn from ``seed``. Raises DataError where a weight
    is missing, left over or of another shape: nothing is ever re-initialised silently. Rows for new tokens are zero,
    and a score that the files do not have is drawn from ``seed``, in float32.
    """
    attention.register()
    grown = model_config(spec)
    auto = auto_model(spec.head, grown)
    if spec.random_init:
        with torch.random.fork_rng(devices=[]), _clear_errors(spec):
            torch.manual_seed(seed)
            model = _attending(grown, partial(auto.from_config, grown, dtype=dtype))
        if spec.head == "score":
            from tuner.model.score import draw_score

            draw_score(model, seed)
        return _finished(model, spec.quantize)
    own = _own_config(spec)
    with _clear_errors(spec):
        vet_weights(spec.name_or_path, spec.revision)
    reader = None if spec.quantize is None else spec.quantize.reader(spec.name_or_path, spec.revision)
    renamed = None
    if spec.unread is not None and reader is None and (renamed := _left_aside(spec, spec.unread, own, dtype)):
        reader = spec.unread
    takes_all = spec.head == "tokens" and grown.get_text_config() is grown and not renamed
    with _clear_errors(spec), without_progress(reports=takes_all):
        load = partial(
            auto.from_pretrained, spec.name_or_path, revision=spec.revision, config=own, dtype=dtype,
            use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            **({} if reader is None else private.options_to_read(reader)),
            **({"key_mapping": renamed} if renamed else {}),
        )
        model, report = _attending(own, load)
    if spec.head == "score":
        from tuner.model.score import give_score

        report = give_score(model, report, seed)
    if reader is not None:
        report = {**report, "unexpected_keys": [key for key in report["unexpected_keys"] if not reader.knows(key)]}
    if spec.unread is not None and renamed:
        report = {**report, "missing_keys": spec.unread.missing(report["missing_keys"])}
    _require_complete(spec, model, report)
    _leave_untrained(model)
    resize_embeddings(model, grown.get_text_config().vocab_size)
    model = _finished(model, spec.quantize)
    if spec.unread is not None and renamed and not spec.unread.settle(model):
        return build_model(replace(spec, unread=None), dtype, seed)
    return model


def _left_aside(
    spec: ModelSpec, unread: "UnreadWeights", config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, str]:
    """What of a model's files the loader is to leave where it is, by their names."""
    with _clear_errors(spec):
        files = weight_files(spec.name_or_path, spec.revision)
        stored = {name: tensor for file in files for name, tensor in stored_in(file).items()}
    return unread.find(meta_model(config, dtype, spec.head), stored)


def fetch_weights(spec: ModelSpec) -> None:
    """Have the weights of a hub model in the cache, in the files that :func:`build_model` reads; else nothing to do.

    For processes that have not met yet: in the middle of a launch the others would wait for the one that loads, and a
    download of 100 GB takes longer than they may. Files that are there already cost a request. Raises MachineError.
    """
    name = spec.name_or_path
    if spec.random_init or huggingface_hub.constants.HF_HUB_OFFLINE or Path(name).is_dir() or os.path.isabs(name):
        return
    with _clear_errors(spec), without_progress(), contextlib.suppress(EntryNotFoundError):  # which the loader explains
        try:
            huggingface_hub.hf_hub_download(name, SAFE_WEIGHTS_NAME, revision=spec.revision)
        except EntryNotFoundError:
            index = Path(huggingface_hub.hf_hub_download(name, SAFE_WEIGHTS_INDEX_NAME, revision=spec.revision))
            patterns = sorted(index_names(index))
            huggingface_hub.snapshot_download(name, revision=spec.revision, allow_patterns=patterns)


def meta_model(config: PretrainedConfig, dtype: torch.dtype, head: Head = "tokens") -> PreTrainedModel:
    """The same model on the meta device: every parameter has its shape and type and no storage."""
    attention.register()
    try:
        with torch.device("meta"):
            model = _attending(config, partial(auto_model(head, config).from_config, config, dtype=dtype))
    except ImportError as error:
        raise _missing(config.model_type, error) from error
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError, AttributeError, KeyError) as error:
        from tuner.model.refusal import unbuildable

        raise unbuildable(config, error) from error
    return _finished(model)


def _missing(what: str, error: ImportError) -> MachineError:
    """Of a model for which transformers needs a library that is not here."""
    return MachineError(f"model: {what}: {_reason(error)}", hint="install it where tuner is installed")


def position_limit(config: PretrainedConfig) -> int | None:
    """The most positions that a model has; None where its config names none, or -1 for no limit, as XLNet's does."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def decoder_blocks(model: PreTrainedModel, needed_by: str = "sharding over processes") -> list[nn.Module]:
    """The repeated decoder layers in order, as transformers names them for sharding (``_no_split_modules``).

    Raises RecipeError where it names none, with what they are `needed_by`: a key of the recipe, mostly.

    What holds the embedding of tokens, which BERT's kin name too, is none: the output layer may share its weight. Nor
    is a part of a layer that is named besides it, as Mamba's mixers are: it would be wrapped twice.
    FSDP2 puts its own name before that of the class of a unit.
    """
    names, embedding = private.decoder_classes(model), model.get_input_embeddings()
    named = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    blocks = [module for module in named if not any(part is embedding for part in module.modules())]
    inside = {part for block in blocks for part in block.modules() if part is not block}
    blocks = [block for block in blocks if block not in inside]
    if not blocks:
        raise RecipeError(
            f"{type(model).__name__} names no decoder layers, which {needed_by} needs",
            hint="leave that out: nothing says what of this class is a layer (its _no_split_modules)",
        )
    return blocks


def auto_model(head: Head, config: PretrainedConfig, whole: bool = False) -> Any:
    """What of transformers makes a model with this head of a config, by `from_config` and `from_pretrained`.

    Of a multimodal checkpoint that is its language model alone; with ``whole``, all of it, as its readers load it.
    """
    if head == "score":
        return transformers.AutoModelForSequenceClassification
    if config.get_text_config() is not config:
        from tuner.model.multimodal import whole_auto, whole_class, without_other_parts

        if (kind := whole_class(config)) is not None:
            return whole_auto(config) if whole else without_other_parts(kind)  # type: ignore[arg-type]  # it has a hash
    return transformers.AutoModelForCausalLM


def is_part(model: nn.Module) -> bool:
    """Whether a model is the language model of a multimodal one, whose other parts were left out."""
    return hasattr(model, "left_out")


def has_score(model: nn.Module) -> bool:
    """Whether a model scores hidden states, in place of making logits of them."""
    return type(model).__name__.endswith("ForSequenceClassification")


def head_layer(model: PreTrainedModel) -> Any:
    """The layer that is applied to hidden states: the output layer, or the score of a reward model."""
    return model.score if has_score(model) else model.get_output_embeddings()


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model that makes hidden states of token ids: what its output layer is applied to."""
    found: nn.Module = model.get_decoder()
    if found is model or not isinstance(found, PreTrainedModel):  # it stands under another name than transformers seeks
        found = getattr(model, "model", found)
    elif is_part(model) and found.get_output_embeddings() is not None:  # a whole text model stands inside (Llama 4)
        found = decoder_of(found)
    return found


def generation_config(spec: ModelSpec, config: PretrainedConfig) -> transformers.GenerationConfig:
    """The model's generation config, or one derived from its config where it ships none."""
    with contextlib.suppress(OSError):
        return transformers.GenerationConfig.from_pretrained(spec.name_or_path, revision=spec.revision or "main")
    return transformers.GenerationConfig.from_model_config(config)


def _attending(config: PretrainedConfig, make: Callable[..., Any]) -> Any:
    """Make a model with our attention where its class computes attention through transformers' interface.

    Where it does not, or looks an implementation up in a table of its own, it is made with what the class chooses.
    """
    if private.takes_our_attention(config):
        try:
            return make(attn_implementation=_packed(config))
        except KeyError as error:
            if error.args != (attention.PACKED,):
                raise
            private.forget_attention(config)
    return make()


def _packed(config: PretrainedConfig) -> str | dict[str, str]:
    """Our attention as a model of this config is asked for it: of a multimodal one, its language model alone."""
    if config.get_text_config() is not config:
        from tuner.model.multimodal import text_key, whole_class

        if whole_class(config) is not None:
            return {text_key(config): attention.PACKED}
    return attention.PACKED


def _finished(model: PreTrainedModel, quantize: BaseQuantizer | None = None) -> PreTrainedModel:
    _exact_constants(model)
    for tensor in private.kept_in_float32(model).values():  # as files are loaded; what is made of a config has one type
        if tensor.dtype in _HALF:
            tensor.data = tensor.data.float()
    model.config.use_cache = False
    model.eval()
    if attention.is_ours(model.config):
        tell_attention(decoder_of(model), model.config)
    if has_score(model):
        from tuner.model.score import require_score_layer

        require_score_layer(model)
        head_layer(model).float()  # it is trained whatever else is
    if quantize is not None:  # all of a random model, and what files hold in another layout
        quantize.finish(model)
    return model


def _leave_untrained(model: PreTrainedModel) -> None:
    """Have parameters that their class never trains (biases that choose experts) so, which loading forgets."""
    if not _UNTRAINED.search(inspect.getsource(sys.modules[type(model).__module__])):
        return
    with torch.device("meta"):
        made = private.new_of_class(type(model), private.plain_config(model.config), dtype=torch.float32)
    untrained = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    for name, parameter in model.named_parameters():
        if name in untrained:
            parameter.requires_grad_(False)


@torch.no_grad()
def _exact_constants(model: PreTrainedModel) -> None:
    """Compute constants that transformers rounded to the type of the weights again, in float32.

    They are in no file, so a rounded one (Gemma's scale of the embeddings) is another model than the one that is
    exported and loaded in another type. One that its class always rounds (RecurrentGemma's) is the model's own.
    """
    if not (rounded := _half_constants(model)):
        return
    with torch.device("meta"):
        made = private.new_of_class(type(model), private.plain_config(model.config), dtype=torch.float32)
    for name in sorted(rounded.keys() - _half_constants(made).keys()):
        rounded[name].data = rounded[name].data.float()
        module = model.get_submodule(name.rpartition(".")[0])
        if not rounded[name].is_meta:
            private.compute_buffers(model, module)


def _half_constants(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers of 16 bits that are in no file, by name."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if buffer.dtype in _HALF and name not in kept}


def _require_complete(spec: ModelSpec, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    problems = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, report.get(kind) or ()))
        if kind == "unexpected_keys" and is_part(model):
            from tuner.model.multimodal import is_left_out

            found = [key for key in found if not is_left_out(model, key)]
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            problems.append(f"{kind.replace('_keys', ' weights').replace('_msgs', 's')}: {', '.join(found[:3])}{more}")
    if problems:
        raise DataError(
            f"the weights of {spec.name_or_path} do not fit its config: {'; '.join(problems)}",
            hint="use the directory's own config, or model.init: random to train from nothing",
        )


@contextlib.contextmanager
def _clear_errors(spec: ModelSpec) -> Iterator[None]:
    where = f"model.name_or_path: {spec.name_or_path}"
    path = Path(spec.name_or_path)
    if path.is_absolute() and not path.is_dir():
        raise RecipeError(f"{where}: no such directory", hint="give a hub name or a directory with config.json")
    try:
        yield
    except (RecipeError, DataError):
        raise
    except ImportError as error:
        raise _missing(spec.name_or_path, error) from error
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError) as error:
        reason = _reason(error)
        if isinstance(error, SafetensorError):
            reason = f"{broken_weights(path)}: {reason}"
        if is_out_of_memory(error):
            raise
        if "can't allocate memory" in reason:
            raise MemoryError(reason) from error
        if path.is_dir() and not (path / "config.json").is_file():
            raise RecipeError(f"{where}: the directory has no config.json") from error
        if path.is_dir() or os.path.isabs(spec.name_or_path):
            raise DataError(f"{where}: cannot be loaded: {reason}") from error
        raise MachineError(
            f"{where}: cannot be fetched or loaded: {reason}",
            hint="check the name and the network, or give a directory",
        ) from error


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__


@contextlib.contextmanager
def without_progress(reports: bool = True) -> Iterator[None]:
    """Within, transformers shows no bars and, without ``reports``, not what of the files it does not take."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not reports:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
