"""Where weights come from: a run's checkpoint, a directory of a Hugging Face model, or one of an adapter alone.

All three are opened by their headers; a tensor is read when it is asked for, and only then is it in memory. A source
may have versions: those of a run are its checkpoints, those of another directory its `step-N`.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tuner.checkpoint.load import read_tensor
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import CheckpointInfo
from tuner.checkpoint.storage import DTYPE_NAMES, DTYPES
from tuner.config.recipe import InitFrom
from tuner.errors import DataError, RecipeError, TunerError
from tuner.model.experts import LORA_A as OF_EXPERTS
from tuner.model.stored import Stored, stored_in, stored_tensors
from tuner.model.vetting import ADAPTER_CONFIG, ADAPTER_WEIGHTS, vet_adapter
from tuner.rundir.checkpoints import LINEAGE
from tuner.rundir.layout import CHECKPOINTS, MODEL_PREFIX
from tuner.rundir.model_path import RunCheckpoint, resolve_model_path
from tuner.runtime.files import read_json, require_small_configs

Kind = Literal["checkpoint", "export", "model directory", "adapter"]
LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
"""The ends of the names of an adapter's parts, as peft's files have them."""
NEW_ROWS = ".new_rows"
"""That of rows of new tokens which are a tensor apart."""
_PEFT_PREFIX = re.compile(r"^base_model\.model\.")
_PICKLED = "pickled weights are never loaded: convert them to safetensors"
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")
"""Beginnings of adapters that move a part of the base's weights into themselves."""


class SourceTensor(NamedTuple):
    """A tensor that a source holds: shape, type (None for one that weights do not have), and what reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], torch.Tensor]
    said: str
    """Its type by the format's name."""


class AdapterFacts(NamedTuple):
    """What makes numbers of an adapter's tensors: the weight gets ``alpha`` / r, or / sqrt(r), times B·A."""

    alpha: float
    use_rslora: bool
    use_dora: bool

    def scale(self, r: int) -> float:
        """The factor of B·A at rank ``r``."""
        return self.alpha / (math.sqrt(r) if self.use_rslora else r)


@dataclass(frozen=True)
class WeightSource:
    """The tensors of one place by their names there: a parameter's as the model has it, or as files publish it."""

    path: Path
    kind: Kind
    tensors: Mapping[str, SourceTensor]
    step: int | None = None
    """Of a checkpoint."""
    adapter: AdapterFacts | None = None
    is_part: bool = False
    """Whether it holds what was trained, and not a whole model."""
    is_tied: bool = False
    """Whether it says that its embeddings and output layer are one weight."""

    @property
    def title(self) -> str:
        """What it is, in words."""
        return f"{self.kind} {self.path}" + ("" if self.step is None else f", step {self.step}")


def plain_name(name: str) -> str:
    """The name of a parameter without what peft adds for itself: the adapter's own name, `base_layer`, a prefix."""
    short = _PEFT_PREFIX.sub("", name).replace(".base_layer.", ".")
    short = short.replace(f"{MAGNITUDE}.default.weight", MAGNITUDE)
    short = short.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")
    return re.sub(r"\.token_adapter\.trainable_tokens_delta$", NEW_ROWS, short).replace(".modules_to_save.", ".")


def open_source(path: Path, hashes: bool) -> WeightSource:
    """What a path holds, by its headers. With ``hashes`` a checkpoint's files are held against its manifest first.

    Raises RecipeError for a path that holds no weights that can be taken, DataError for damaged files.
    """
    found = resolve_model_path(path, shards=hashes)
    if isinstance(found, RunCheckpoint):
        return _of_checkpoint(found.checkpoint)
    if found.is_adapter:
        return _of_adapter(found.path)
    config = read_json(found.path / "config.json")
    if config.get("quantization_config"):
        raise RecipeError(
            f"{found.path}: its weights are codes of a quantised model", hint="take the model that it was made of"
        )
    tensors = _readable(stored_tensors(found.path))
    if not tensors:
        raise DataError(f"{found.path}: holds no model.safetensors", hint=_PICKLED)
    kind: Kind = "export" if (found.path / LINEAGE).is_file() else "model directory"
    return WeightSource(found.path, kind, tensors, is_tied=bool(config.get("tie_word_embeddings", False)))


def _of_checkpoint(info: CheckpointInfo) -> WeightSource:
    tensors = {}
    if any(name.startswith(MODEL_PREFIX) and name.endswith(OF_EXPERTS) for name in info.index()):
        raise RecipeError(
            f"{info.path}: its adapter is one of routed experts, too, which is not taken",
            hint="merge it, and take that: tuner export-hf RUN",
        )
    for name, entry in info.index().items():
        if name.startswith(MODEL_PREFIX):
            read = functools.partial(read_tensor, info.path, entry)
            own = plain_name(name.removeprefix(MODEL_PREFIX))
            tensors[own] = SourceTensor(entry.shape, entry.dtype, read, DTYPE_NAMES[entry.dtype])
    facts = info.meta.get("adapter")
    adapter = None
    if isinstance(facts, Mapping) and facts.get("kind", "lora") != "none":
        adapter = AdapterFacts(float(facts["alpha"]), bool(facts.get("use_rslora")), facts.get("kind") == "dora")
    is_part = info.meta.get("frozen_hash") is not None
    config = (info.meta.get("model") or {}).get("config") or {}
    tied = bool(config.get("tie_word_embeddings", False))
    return WeightSource(info.path, "checkpoint", tensors, info.step, adapter, is_part, tied)


def _of_adapter(path: Path) -> WeightSource:
    require_small_configs(path)
    config = read_json(path / ADAPTER_CONFIG)
    if problem := _not_taken(config):
        raise RecipeError(f"{path / ADAPTER_CONFIG}: {problem}", hint="merge it into its base with peft, and take that")
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{path}: holds no {ADAPTER_WEIGHTS}", hint=_PICKLED)
    vet_adapter(path)
    facts = AdapterFacts(
        float(config.get("lora_alpha", 8)), bool(config.get("use_rslora")), bool(config.get("use_dora"))
    )
    return WeightSource(path, "adapter", _readable(stored_in(path / ADAPTER_WEIGHTS)), None, facts, is_part=True)


def _not_taken(config: Mapping[str, Any]) -> str | None:
    """Why an adapter of this config is not taken; None where it is."""
    if config.get("peft_type") != "LORA":
        return f"an adapter of peft_type {config.get('peft_type')}; LoRA, rsLoRA and DoRA are taken"
    for key in ("alpha_pattern", "target_parameters", "layer_replication"):
        if config.get(key):
            return f"its {key} is not taken"
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_OTHER_BASE):
        return f"init_lora_weights: {init} belongs to a base with other weights than the published one"
    return None


def _readable(stored: Mapping[str, Stored]) -> dict[str, SourceTensor]:
    @functools.cache
    def opened(file: Path) -> Any:
        return safe_open(file, "pt")

    def read(file: Path, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = opened(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file}: {name} cannot be read: {error}") from error
        return found

    found: dict[str, SourceTensor] = {}
    for name, tensor in stored.items():
        plain = plain_name(name)
        if plain in found:
            raise DataError(f"{tensor.file}: two of its tensors are {plain}, one of them {name}")
        reader = functools.partial(read, tensor.file, name)
        found[plain] = SourceTensor(tensor.shape, DTYPES.get(tensor.dtype), reader, tensor.dtype)
    return found


def newest_version(
    source: Path, than: Path | None = None, pass_over: Callable[[str], None] = lambda text: None
) -> Path:
    """The newest version that is whole; ``than``, the current one, where none is newer.

    A checkpoint's files are held against its manifest. ``pass_over`` is called with what is wrong with a newer one.
    Raises RecipeError where there is none at all.
    """
    of_run = source / CHECKPOINTS
    problem = ""
    for number, path in step_dirs(of_run if of_run.is_dir() else source):
        if than is not None and number <= int(than.name.rpartition("-")[2]):
            break
        try:
            open_source(path, hashes=True)
        except TunerError as error:
            problem = problem or f"; {path.name}: {error.message}"
            pass_over(f"{path} is passed over: {error.message}")
            continue
        return path
    if than is not None:
        return than
    raise RecipeError(
        f"{source} has no versions, so that nothing newer can come from it: it is neither a run with a checkpoint nor "
        f"a directory of step-N{problem}",
        hint="leave out every; or name a run that has saved, or its exports, such as runs/NAME/exports",
    )


def pinned(entries: Sequence[InitFrom], versions: Mapping[int, str]) -> dict[int, InitFrom]:
    """Entries by number, and each with a version as one of that path, which never changes."""
    fixed = {n: entries[n].model_copy(update={"path": path, "every": None}) for n, path in versions.items()}
    return dict(enumerate(entries)) | fixed


def versions_in(given: Mapping[str, Any]) -> dict[int, str]:
    """The paths of the entries of `model.init_from` by number, as a checkpoint notes what its run was given."""
    return {number: str(entry["path"]) for number, entry in enumerate(given["entries"])}
