"""What becomes a GGUF file: a run's checkpoint, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from tuner.errors import DataError, RecipeError
from tuner.export import verify
from tuner.export.frozen import published_tensors, require_same_frozen
from tuner.export.gguf import lora
from tuner.export.outputs import ExportedValues, trained_skeleton
from tuner.export.source import ExportSource, Weights, resolve
from tuner.export.tensors import OpenFiles, TensorSource
from tuner.export.weights import first_line, load_trained, read_config
from tuner.export.write import ADAPTER_CONFIG, GENERATION_CONFIG, token_ids, turn_ends, write_generation_config
from tuner.model.adapter import ADAPTER, lora_layers
from tuner.model.freeze import frozen_names
from tuner.model.low_rank import LowRank
from tuner.rundir.keep import CheckpointHold
from tuner.rundir.layout import RESOLVED_RECIPE, TOKENIZER, export_dir
from tuner.rundir.model_path import HfDirectory, Warn, Which, is_run_path, readable_record, resolve_model_path
from tuner.runtime.files import MANIFEST_NAME, read_json, scratch_dir, sha256_file

_IN_PEFT = "base_model.model."


def source_of(path: Path, warn: Warn, step: Which, weights: Weights, is_adapter: bool = False) -> GgufSource:
    """What a path means, its adapter by itself or merged. Raises RecipeError for what llama.cpp has no file for."""
    if is_run_path(path):
        return TrainedModel(resolve(path, warn, shards=False, step=step, weights=weights), is_adapter)
    if step != "newest" or weights.kind != "trained":
        raise RecipeError(f"{path}: is no run, and has no other steps and no other weights")
    found = resolve_model_path(path, warn)
    if isinstance(found, HfDirectory) and found.is_adapter:
        if not is_adapter:
            raise RecipeError(f"{path}: an adapter alone, without its model", hint="add --adapter keep")
        return AdapterDirectory.of(found.path)
    if is_adapter:
        raise RecipeError(f"{path}: a whole model, which has no adapter to keep", hint="leave out --adapter keep")
    return Directory(found.path)


@dataclass(frozen=True)
class Directory:
    """A Hugging Face directory of a whole model."""

    path: Path
    is_adapter = False
    """Whether the adapter is written by itself: `tensors` are then those of the model that it was trained on."""

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's config. Raises DataError."""
        auto: Any = AutoConfig
        try:
            config: PretrainedConfig = auto.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.path}: no readable model config: {first_line(error)}") from error
        return config

    @property
    def lineage(self) -> Mapping[str, Any]:
        """What the file's metadata say of where it comes from, `general.name` among it; no local paths."""
        return {"general.name": self.path.name}

    def low_rank(self, files: OpenFiles) -> Mapping[str, LowRank]:
        """The adapter of each adapted weight, by the weight's published name: it has none."""
        return {}

    @property
    def tokenizer_directory(self) -> Path:
        """Where the tokenizer's files are."""
        return self.path

    def held(self) -> AbstractContextManager[object]:
        """Inside it nobody prunes what is read: nobody prunes a directory."""
        return nullcontext()

    def default_output(self, kind: str) -> Path:
        """Where a file of this type goes unless the user names a place: next to the directory."""
        return self.path.with_name(f"{self.path.name}-{kind}.gguf")

    def ends(self, tokenizer: Any) -> list[int]:
        """Ids at which generation stops: of generation_config.json, and what the template closes a turn with."""
        path = self.path / GENERATION_CONFIG
        known = token_ids(read_json(path).get("eos_token_id")) if path.is_file() else []
        known += token_ids(getattr(self.config, "eos_token_id", None)) + token_ids(tokenizer.eos_token_id)
        return list(dict.fromkeys(known + turn_ends(tokenizer, known)))

    def tensors(self, files: OpenFiles) -> Mapping[str, TensorSource]:
        """Every published tensor by its name. Raises DataError."""
        return published_tensors(files, str(self.path), None)

    def reference(self) -> torch.nn.Module:
        """The model in transformers, float32."""
        return verify.load_plain(self.path, "tokens")

    def texts(self) -> Sequence[Mapping[str, Any]]:
        """What training recorded of texts, their ids and messages: nobody recorded any."""
        return []


@dataclass(frozen=True)
class AdapterDirectory(Directory):
    """peft's directory of a LoRA adapter; the path is that of its base."""

    adapter: Path
    is_adapter = True

    @staticmethod
    def of(path: Path) -> AdapterDirectory:
        """With the base that it names. Raises RecipeError where that is not here, or GGUF cannot hold the adapter."""
        facts = read_json(path / ADAPTER_CONFIG)
        lora.refuse(str(path / ADAPTER_CONFIG), facts)
        base = Path(str(facts.get("base_model_name_or_path") or ""))
        if not (base / "config.json").is_file():
            raise RecipeError(
                f"{path / ADAPTER_CONFIG}: base_model_name_or_path: {base}: no model's directory; the proof needs it",
                hint="write there where its base is",
            )
        return AdapterDirectory(base, path)

    @property
    def lineage(self) -> Mapping[str, Any]:
        """See `Directory`."""
        return {"general.name": self.adapter.name}

    @property
    def tokenizer_directory(self) -> Path:
        """Its own where it has one."""
        return self.adapter if (self.adapter / "tokenizer.json").is_file() else self.path

    def default_output(self, kind: str) -> Path:
        """Next to the directory."""
        return self.adapter.with_name(f"{self.adapter.name}-{kind}.gguf")

    @cached_property
    def _loaded(self) -> torch.nn.Module:
        return verify.load_adapter(self.adapter, verify.load_plain(self.path, "tokens"))

    def low_rank(self, files: OpenFiles) -> Mapping[str, LowRank]:
        """As peft loads it."""
        layers: Any = lora_layers(self._loaded)
        return {
            f"{name.removeprefix(_IN_PEFT)}.weight": LowRank(
                layer.lora_A[ADAPTER].weight.detach().float(),
                layer.lora_B[ADAPTER].weight.detach().float(),
                float(layer.scaling[ADAPTER]),
            )
            for name, layer in layers
        }

    def reference(self) -> torch.nn.Module:
        """See `Directory`."""
        return self._loaded


@dataclass(frozen=True)
class TrainedModel:
    """A run's checkpoint, with its adapter merged or that by itself."""

    source: ExportSource
    is_adapter: bool = False

    def __post_init__(self) -> None:
        """Raise RecipeError for models that llama.cpp has no file for."""
        if self.is_adapter:
            self._require_adapter()
        if self.source.head == "score":
            raise RecipeError("a reward model has no output layer that llama.cpp could sample from")
        if self.source.quantize != "none" or self.source.model.get("untouched"):
            what = "its base was quantised" if self.source.quantize != "none" else "it is a multimodal model"
            raise RecipeError(
                f"{self.source.checkpoint.path}: {what}: a GGUF file is written of its exported directory"
            )

    @cached_property
    def config(self) -> PretrainedConfig:
        """See `Directory`."""
        return read_config(self.source)

    def _require_adapter(self) -> None:
        source = self.source
        if source.adapter is None:
            raise RecipeError("--adapter keep: the run trained all parameters, it has no adapter to keep")
        lora.refuse(str(source.run_dir), source.adapter)
        found = {"new tokens": source.new_ids, "a random base": source.is_random, "a given base": source.given_frozen}
        if there := [name for name, has in found.items() if has]:
            raise RecipeError(
                f"{source.run_dir}: a GGUF adapter cannot be added to {there[0]}", hint="merge it: --adapter merge"
            )

    @cached_property
    def lineage(self) -> Mapping[str, Any]:
        """See `Directory`."""
        source, recipe = self.source, self.source.run_dir / RESOLVED_RECIPE
        record = readable_record(source.run_dir) or {}
        found = {
            "general.name": str(source.recipe.get("name") or source.run_dir.name),
            "general.license": source.model.get("licence"),
            "tuner.base_model": source.hub_name,
            "tuner.run_id": record.get("run_id"),
            "tuner.step": str(source.step),
            "tuner.manifest_sha256": sha256_file(source.checkpoint.path / MANIFEST_NAME),
            "tuner.recipe_sha256": sha256_file(recipe) if recipe.is_file() else None,
            "tuner.weights": source.weights.suffix or None,
        }
        if source.hub_name is not None:
            found |= {
                "general.base_model.count": 1,
                "general.base_model.0.name": source.hub_name.rpartition("/")[2],
                "general.base_model.0.repo_url": f"https://huggingface.co/{source.hub_name}",
            }
        return {key: value for key, value in found.items() if value is not None}

    @property
    def tokenizer_directory(self) -> Path:
        """See `Directory`."""
        return self.source.run_dir / TOKENIZER

    def held(self) -> AbstractContextManager[object]:
        """See `Directory`."""
        with ExitStack() as stack:
            for info in self.source.checkpoints:
                stack.enter_context(CheckpointHold(info.path))
            return stack.pop_all()

    def default_output(self, kind: str) -> Path:
        """Next to the run's other exports."""
        directory = export_dir(self.source.run_dir, self.source.step)
        parts = (directory.name, self.source.weights.suffix, "adapter" if self.is_adapter else "", kind)
        return directory.with_name(f"{'-'.join(filter(None, parts))}.gguf")

    def ends(self, tokenizer: Any) -> list[int]:
        """Those that an export's generation_config.json has."""
        with scratch_dir("gguf-") as directory:
            write_generation_config(directory, self.source, self.config)
            return token_ids(read_json(directory / GENERATION_CONFIG).get("eos_token_id"))

    def tensors(self, files: OpenFiles) -> Mapping[str, TensorSource]:
        """As they were trained, checked as an export checks them."""
        verify.require_same_tokenizer(self.source)
        trained = trained_skeleton(self.source)
        require_same_frozen(self.source, trained.plain, frozen_names(trained.adapted), files)
        values = ExportedValues(self.source, trained, files)
        outputs = (values.without_adapter if self.is_adapter else values.merged)(torch.float32)
        return {output.name: output.source for output in outputs}

    def low_rank(self, files: OpenFiles) -> Mapping[str, LowRank]:
        """As the checkpoint holds it."""
        return ExportedValues(self.source, trained_skeleton(self.source), files).low_rank()

    def reference(self) -> torch.nn.Module:
        """See `Directory`."""
        model: torch.nn.Module = load_trained(self.source).eval()
        return model

    def texts(self) -> Sequence[Mapping[str, Any]]:
        """See `Directory`."""
        return verify.recorded_ids(self.source)


GgufSource = TrainedModel | Directory
"""A model with its tokenizer, and what is known of its training."""


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory as transformers has it. Raises DataError."""
    auto: Any = AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{directory}: transformers cannot load the tokenizer: {first_line(error)}") from error
    if not getattr(tokenizer, "backend_tokenizer", None):
        raise DataError(f"{directory}: transformers has a slow tokenizer alone for it")
    return tokenizer
