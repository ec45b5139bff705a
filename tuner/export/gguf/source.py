"""What becomes a GGUF file: a run's checkpoint, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from tuner.errors import DataError, RecipeError
from tuner.export import verify
from tuner.export.frozen import published_tensors, require_same_frozen
from tuner.export.outputs import ExportedValues, trained_skeleton
from tuner.export.source import ExportSource, Weights, resolve
from tuner.export.tensors import OpenFiles, TensorSource
from tuner.export.weights import first_line, load_trained, read_config
from tuner.export.write import GENERATION_CONFIG, token_ids, turn_ends, write_generation_config
from tuner.model.freeze import frozen_names
from tuner.rundir.keep import CheckpointHold
from tuner.rundir.layout import TOKENIZER, export_dir
from tuner.rundir.model_path import HfDirectory, Warn, Which, is_run_path, resolve_model_path
from tuner.runtime.files import MANIFEST_NAME, read_json, scratch_dir, sha256_file


class GgufSource(Protocol):
    """A model with its tokenizer, and what is known of its training."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's config. Raises DataError."""

    @property
    def lineage(self) -> Mapping[str, str]:
        """What the file's metadata say of where it comes from, `general.name` among it; no local paths."""

    @property
    def tokenizer_directory(self) -> Path:
        """Where the tokenizer's files are."""

    def held(self) -> AbstractContextManager[object]:
        """Inside it nobody prunes what is read."""

    def default_output(self, kind: str) -> Path:
        """Where a file of this type goes unless the user names a place."""

    def ends(self, tokenizer: Any) -> list[int]:
        """Ids at which generation stops."""

    def tensors(self, files: OpenFiles) -> Mapping[str, TensorSource]:
        """Every published tensor by its name. Raises DataError."""

    def reference(self) -> torch.nn.Module:
        """The model in transformers, float32."""

    def texts(self) -> Sequence[Mapping[str, Any]]:
        """What training recorded of texts, their ids and messages; empty where it recorded none."""


def source_of(path: Path, warn: Warn, step: Which, weights: Weights) -> GgufSource:
    """What a path means. Raises RecipeError for what llama.cpp has no file for."""
    if is_run_path(path):
        return TrainedModel(resolve(path, warn, shards=False, step=step, weights=weights))
    if step != "newest" or weights.kind != "trained":
        raise RecipeError(f"{path}: is no run, and has no other steps and no other weights")
    found = resolve_model_path(path, warn)
    if isinstance(found, HfDirectory) and found.is_adapter:
        raise RecipeError(f"{path}: an adapter alone, which is written merged: from the run that trained it")
    return Directory(found.path)


@dataclass(frozen=True)
class Directory:
    """A Hugging Face directory of a whole model."""

    path: Path

    @cached_property
    def config(self) -> PretrainedConfig:
        """See `GgufSource`."""
        auto: Any = AutoConfig
        try:
            config: PretrainedConfig = auto.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{self.path}: no readable model config: {first_line(error)}") from error
        return config

    @property
    def lineage(self) -> Mapping[str, str]:
        """See `GgufSource`."""
        return {"general.name": self.path.name}

    @property
    def tokenizer_directory(self) -> Path:
        """See `GgufSource`."""
        return self.path

    def held(self) -> AbstractContextManager[object]:
        """Nobody prunes a directory."""
        return nullcontext()

    def default_output(self, kind: str) -> Path:
        """Next to the directory."""
        return self.path.with_name(f"{self.path.name}-{kind}.gguf")

    def ends(self, tokenizer: Any) -> list[int]:
        """Those of generation_config.json, and what the template closes a turn with."""
        path = self.path / GENERATION_CONFIG
        known = token_ids(read_json(path).get("eos_token_id")) if path.is_file() else []
        known += token_ids(getattr(self.config, "eos_token_id", None)) + token_ids(tokenizer.eos_token_id)
        return list(dict.fromkeys(known + turn_ends(tokenizer, known)))

    def tensors(self, files: OpenFiles) -> Mapping[str, TensorSource]:
        """See `GgufSource`."""
        return published_tensors(files, str(self.path), None)

    def reference(self) -> torch.nn.Module:
        """See `GgufSource`."""
        return verify.load_plain(self.path, "tokens")

    def texts(self) -> Sequence[Mapping[str, Any]]:
        """None: nobody recorded any."""
        return []


@dataclass(frozen=True)
class TrainedModel:
    """A run's checkpoint, with its adapter merged."""

    source: ExportSource

    def __post_init__(self) -> None:
        """Raise RecipeError for models that llama.cpp has no file for."""
        if self.source.head == "score":
            raise RecipeError("a reward model has no output layer that llama.cpp could sample from")
        if self.source.quantize != "none" or self.source.model.get("untouched"):
            what = "its base was quantised" if self.source.quantize != "none" else "it is a multimodal model"
            raise RecipeError(
                f"{self.source.checkpoint.path}: {what}: a GGUF file is written of its exported directory"
            )

    @cached_property
    def config(self) -> PretrainedConfig:
        """See `GgufSource`."""
        return read_config(self.source)

    @cached_property
    def lineage(self) -> Mapping[str, str]:
        """See `GgufSource`."""
        source = self.source
        found = {
            "general.name": str(source.recipe.get("name") or source.run_dir.name),
            "general.license": source.model.get("licence"),
            "tuner.base_model": source.hub_name,
            "tuner.step": str(source.step),
            "tuner.manifest_sha256": sha256_file(source.checkpoint.path / MANIFEST_NAME),
        }
        if source.weights.kind != "trained":
            found["tuner.weights"] = source.weights.suffix
        return {key: value for key, value in found.items() if isinstance(value, str)}

    @property
    def tokenizer_directory(self) -> Path:
        """See `GgufSource`."""
        return self.source.run_dir / TOKENIZER

    def held(self) -> AbstractContextManager[object]:
        """See `GgufSource`."""
        with ExitStack() as stack:
            for info in self.source.checkpoints:
                stack.enter_context(CheckpointHold(info.path))
            return stack.pop_all()

    def default_output(self, kind: str) -> Path:
        """Next to the run's other exports."""
        directory = export_dir(self.source.run_dir, self.source.step)
        average = f"-{self.source.weights.suffix}" if self.source.weights.suffix else ""
        return directory.with_name(f"{directory.name}{average}-{kind}.gguf")

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
        outputs = ExportedValues(self.source, trained, files).merged(torch.float32)
        return {output.name: output.source for output in outputs}

    def reference(self) -> torch.nn.Module:
        """See `GgufSource`."""
        model: torch.nn.Module = load_trained(self.source).eval()
        return model

    def texts(self) -> Sequence[Mapping[str, Any]]:
        """See `GgufSource`."""
        return verify.recorded_ids(self.source)


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
