"""What becomes a GGUF file: a run's checkpoint, or a Hugging Face directory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from tuner.checkpoint.open import CheckpointInfo
from tuner.errors import DataError, RecipeError
from tuner.export import verify
from tuner.export.gguf import lora
from tuner.export.outputs import ExportedValues, trained_skeleton
from tuner.export.source import ExportSource, Weights, path_of, resolve
from tuner.export.tensors import OpenFiles, TensorSource
from tuner.export.weights import config_in, load_trained, published_tensors, read_config, require_same_frozen
from tuner.export.write import ADAPTER_CONFIG, generation_in
from tuner.model.adapter import ADAPTER, lora_layers
from tuner.model.freeze import frozen_names
from tuner.model.low_rank import LowRank
from tuner.rundir.layout import MODEL_CONFIG, RESOLVED_RECIPE, TOKENIZER, export_dir
from tuner.rundir.model_path import HfDirectory, Warn, Which, is_run_path, readable_record, resolve_model_path
from tuner.runtime.files import MANIFEST_NAME, read_json, sha256_file

_IN_PEFT = "base_model.model."


@dataclass(frozen=True)
class GgufSource:
    """A model with its tokenizer, and what is known of its training."""

    config: PretrainedConfig
    place: Path
    """Next to it a file goes unless the user names a place, with its name and the type."""
    tokenizer_directory: Path
    lineage: Mapping[str, Any]
    """What the file's metadata say of where it comes from, `general.name` among it; no local paths."""
    generation: Mapping[str, Any]
    """What its generation_config.json says; empty where it has none."""
    tensors: Callable[[OpenFiles], Mapping[str, TensorSource]]
    """Every published tensor by its name: of an adapter by itself, of the model that it was trained on."""
    reference: Callable[[], torch.nn.Module]
    """The model in transformers, float32."""
    low_rank: Callable[[OpenFiles], Mapping[str, LowRank]] | None = None
    """Where an adapter is written by itself, that of each adapted weight by the weight's published name."""
    texts: Sequence[Mapping[str, Any]] = ()
    """What training recorded of texts, their ids and messages."""
    checkpoints: Sequence[CheckpointInfo] = ()
    """What nobody may prune while it is read."""


def source_of(path: Path, warn: Warn, step: Which, weights: Weights, is_adapter: bool = False) -> GgufSource:
    """What a path means, its adapter by itself or merged. Raises RecipeError for what llama.cpp has no file for."""
    if is_run_path(path):
        return _of_run(resolve(path, warn, shards=False, step=step, weights=weights), is_adapter)
    if step != "newest" or weights.kind != "trained":
        raise RecipeError(f"{path}: is no run, and has no other steps and no other weights")
    found = resolve_model_path(path, warn)
    if isinstance(found, HfDirectory) and found.is_adapter:
        if not is_adapter:
            raise RecipeError(f"{path}: an adapter alone, without its model", hint="add --adapter keep")
        return _of_adapter(found.path)
    if is_adapter:
        raise RecipeError(f"{path}: a whole model, which has no adapter to keep", hint="leave out --adapter keep")
    return _of_directory(found.path)


def _of_directory(path: Path) -> GgufSource:
    """A Hugging Face directory of a whole model. Raises DataError."""
    return GgufSource(
        config_in(path), path, path, {"general.name": path.name}, generation_in(path), partial(_tensors_in, path),
        partial(verify.load_plain, path, "tokens"),
    )


def _tensors_in(path: Path, files: OpenFiles) -> Mapping[str, TensorSource]:
    if found := published_tensors(files, str(path), None):
        return found
    raise DataError(
        f"{path}: holds no model.safetensors", hint="pickled weights are never loaded: convert them to safetensors"
    )


def _of_adapter(path: Path) -> GgufSource:
    """peft's directory of a LoRA adapter, with the base that it names.

    Raises RecipeError where that is not here, or GGUF cannot hold the adapter.
    """
    facts = read_json(path / ADAPTER_CONFIG)
    lora.refuse(str(path / ADAPTER_CONFIG), facts)
    base = Path(str(facts.get("base_model_name_or_path") or ""))
    if not (base / "config.json").is_file():
        raise RecipeError(
            f"{path / ADAPTER_CONFIG}: base_model_name_or_path: {base}: no model's directory; the proof needs it",
            hint="write there where its base is",
        )
    loaded = cache(lambda: verify.load_adapter(path, verify.load_plain(base, "tokens")))

    def low_rank(files: OpenFiles) -> Mapping[str, LowRank]:
        layers: Any = lora_layers(loaded())
        return {
            f"{name.removeprefix(_IN_PEFT)}.weight": LowRank(
                layer.lora_A[ADAPTER].weight.detach().float(), layer.lora_B[ADAPTER].weight.detach().float(),
                float(layer.scaling[ADAPTER]),
            )
            for name, layer in layers
        }

    return replace(
        _of_directory(base), place=path, tokenizer_directory=path if (path / "tokenizer.json").is_file() else base,
        lineage={"general.name": path.name}, reference=loaded, low_rank=low_rank,
    )


def _of_run(source: ExportSource, is_adapter: bool) -> GgufSource:
    """A run's checkpoint, with its adapter merged or that by itself; the tensors are checked as an export checks them.
    """
    if is_adapter:
        _require_adapter(source)
    if source.head == "score":
        raise RecipeError("a reward model has no output layer that llama.cpp could sample from")
    if source.quantize != "none" or source.model.get("untouched"):
        what = "its base was quantised" if source.quantize != "none" else "it is a multimodal model"
        raise RecipeError(f"{source.checkpoint.path}: {what}: a GGUF file is written of its exported directory")

    def tensors(files: OpenFiles) -> Mapping[str, TensorSource]:
        verify.require_same_tokenizer(source)
        trained = trained_skeleton(source)
        require_same_frozen(source, trained.plain, frozen_names(trained.adapted), files)
        outputs = ExportedValues(source, trained, files).merged(torch.float32, with_adapter=not is_adapter)
        return {output.name: output.source for output in outputs}

    place = export_dir(source.run_dir, source.step, "adapter" if is_adapter else "")
    return GgufSource(
        read_config(source), path_of(place, source.weights), source.run_dir / TOKENIZER, _lineage(source),
        generation_in(source.run_dir / MODEL_CONFIG), tensors, lambda: load_trained(source).eval(),
        (lambda files: ExportedValues(source, trained_skeleton(source), files).low_rank()) if is_adapter else None,
        verify.recorded_ids(source), source.checkpoints,
    )


def _require_adapter(source: ExportSource) -> None:
    if source.adapter is None:
        raise RecipeError("--adapter keep: the run trained all parameters, it has no adapter to keep")
    lora.refuse(str(source.run_dir), source.adapter)
    found = {"new tokens": source.new_ids, "a random base": source.is_random, "a given base": source.given_frozen}
    if there := [name for name, has in found.items() if has]:
        raise RecipeError(
            f"{source.run_dir}: a GGUF adapter cannot be added to {there[0]}", hint="merge it: --adapter merge"
        )


def _lineage(source: ExportSource) -> Mapping[str, Any]:
    recipe, record = source.run_dir / RESOLVED_RECIPE, readable_record(source.run_dir) or {}
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
            "general.base_model.count": 1, "general.base_model.0.name": source.hub_name.rpartition("/")[2],
            "general.base_model.0.repo_url": f"https://huggingface.co/{source.hub_name}",
        }
    return {key: value for key, value in found.items() if value is not None}
