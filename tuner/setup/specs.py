"""What a resolved recipe asks of the layers below, in their words: processes, what is made of the model, precision."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from tuner.config import recipe as config
from tuner.config.methods import head_of
from tuner.config.numbers import Duration
from tuner.config.optimizers import Optimizer
from tuner.config.recipe import ParallelSection, Recipe
from tuner.model.build import meta_model
from tuner.model.documents import Padding
from tuner.model.trainable import TrainableSpec, spec_of
from tuner.parallel.assemble import AssemblySpec, Kernels, Recompute
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.setup.resolve import Resolved, quantize_of
from tuner.setup.settled import changed, rows_at_once
from tuner.train.step import StepConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The type of autocast by `train.precision`; under fp8, of all but the products that are made in it."""


def require_groups(recipe: Recipe, rank_info: RankInfo) -> None:
    """Raise MachineError where so many processes do not divide into a recipe's groups, whichever way is sharded."""
    shard = "full" if recipe.parallel.shard == "auto" else recipe.parallel.shard
    mesh_of(recipe.parallel.model_copy(update={"shard": shard}), rank_info)


def mesh_of(parallel: ParallelSection, rank_info: RankInfo) -> Mesh:
    """The processes of a launch as a resolved recipe lays them out."""
    shard, on_host = parallel.shard, parallel.offload == "host"
    spec = MeshSpec(shard, parallel.tensor, parallel.sequence, parallel.expert, parallel.replicas, on_host)
    return Mesh.of(rank_info, spec)


def joined(resolved: Resolved, rank_info: RankInfo) -> AbstractContextManager[None]:
    """The processes of a launch, together; one alone is a group where it has shards."""
    parallel = resolved.recipe.parallel
    kind, alone = resolved.facts.kind, parallel.offload == "host"
    return process_group(rank_info, kind, parallel.timeout.seconds, alone=alone)


def weight_parts(parallel: ParallelSection, rank_info: RankInfo) -> int:
    """Over how many processes a resolved recipe splits the weights of one copy of its model, and their state."""
    mesh = mesh_of(parallel, rank_info)
    return mesh.axes.get("shard", 1) * mesh.tensor


def step_config_of(resolved: Resolved, device: torch.device, rank_info: RankInfo) -> StepConfig:
    """How a resolved recipe computes on a device, and with which processes."""
    recipe, mesh = resolved.recipe, mesh_of(resolved.recipe.parallel, rank_info)
    autocast = _autocast(device, recipe.train.precision)
    whole = recipe.parallel.accumulate == "whole"
    return StepConfig(device, autocast, recipe.train.max_grad_norm, recipe.seed, mesh, whole)


def _autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[object]]:
    if precision == "fp32":
        return contextlib.nullcontext
    # A pass uses each weight once: kept, the rounded copies of all layers would outlive what recomputing frees.
    return lambda: torch.autocast(device.type, dtype=COMPUTED[precision], cache_enabled=False)


@dataclass(frozen=True)
class StepSections:
    """The sections that decide how long a step takes, and what it sends."""

    model: config.ModelSection
    adapter: config.Adapter
    train: config.TrainSection
    optimizer: Optimizer
    parallel: config.ParallelSection


def step_sections(resolved: Resolved, values: Mapping[str, Any] | None = None) -> StepSections:
    """Those of a resolved recipe, with other values where some are given."""
    recipe = changed(resolved.recipe, values or {})
    return StepSections(recipe.model, recipe.adapter, recipe.train, recipe.optimizer, recipe.parallel)


@dataclass(frozen=True)
class TaskSections:
    """What the tasks between steps go by."""

    eval: config.EvalSection
    checkpoint: config.CheckpointSection
    health: config.HealthSection
    profile: config.ProfileSection
    prober: config.ProberSection
    logging: config.LoggingSection
    hooks: tuple[config.HookSection, ...]
    stop_after: Duration | None
    stop_file: str | None
    timeout_s: float
    """What processes wait for each other."""
    spike_window: int
    trained_from_nothing: int | None
    """Parameters without the input embedding, of a model that begins at random; None of others."""


def task_sections(resolved: Resolved) -> TaskSections:
    """Those of a resolved recipe."""
    recipe = resolved.recipe
    return TaskSections(
        recipe.eval, recipe.checkpoint, recipe.health, recipe.profile, recipe.prober, recipe.logging, recipe.hooks,
        recipe.train.stop_after, recipe.train.stop_file, recipe.parallel.timeout.seconds,
        recipe.train.spike_window, _trained_from_nothing(resolved),
    )  # fmt: skip


def _trained_from_nothing(resolved: Resolved) -> int | None:
    if resolved.recipe.model.init != "random" or resolved.recipe.model.init_from:
        return None
    embedding = meta_model_of(resolved).get_input_embeddings()
    return resolved.n_parameters - sum(parameter.numel() for parameter in embedding.parameters())


def assembly_spec(resolved: Resolved) -> AssemblySpec:
    """What a resolved recipe makes of the model."""
    recipe = resolved.recipe
    train, longest = recipe.train, resolved.max_length
    tokens = longest * rows_at_once(train)
    return AssemblySpec(
        trainable=trainable_of(recipe, resolved.new_ids), seed=recipe.seed, route=resolved.route,
        kernels=cast("Kernels", recipe.model.kernels), quantize=quantize_of(recipe),
        recompute=cast("Recompute", train.gradient_checkpointing),
        recomputed_layers=train.gradient_checkpointing_layers, recomputed_modules=train.gradient_checkpointing_modules,
        offload=train.offload_activations is True, tiles=train.tiled_mlp is True,
        padding=Padding(tokens, longest) if train.compile is True else None,
        reshard_after_forward=recipe.parallel.reshard_after_forward, on_host=recipe.parallel.offload == "host",
        reduce_dtype=torch.bfloat16 if recipe.parallel.reduce_dtype == "bf16" else None,
        param_dtype=COMPUTED.get(train.precision) if recipe.adapter.kind == "none" else None,
        tokens=tokens, step_tokens=longest * recipe.train.global_batch_size,
        row_wise=tuple(pattern for item in recipe.optimizer.rows for pattern in item.match),
        float8=train.precision == "fp8", float8_except=train.fp8_except,
    )


def teacher_spec(taught: Resolved) -> AssemblySpec:
    """What is made of a teacher: nothing of it is trained, computed again or compiled."""
    spec = replace(assembly_spec(taught), trainable=TrainableSpec(nothing=True), param_dtype=None)
    return replace(spec, recompute="none", offload=False, tiles=False, padding=None, float8=False, row_wise=())


def trainable_of(recipe: Recipe, new_ids: range) -> TrainableSpec:
    """Which parameters a recipe trains; ``new_ids`` are those of the tokens that it adds."""
    return TrainableSpec(spec_of(recipe.adapter), recipe.model.freeze, new_ids, recipe.model.init == "random")


def meta_model_of(resolved: Resolved, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model that is trained, without storage; in another type where one is given."""
    recipe = resolved.recipe
    # Of a config of its own: making a model writes its attention there, and the model that trains reads it from there.
    return meta_model(copy.deepcopy(resolved.config), dtype or DTYPES[recipe.model.dtype], head_of(recipe.method))


def trained_count(resolved: Resolved) -> int:
    """How many of the parameters are trained, an adapter's included; counted on a model without storage.

    Raises RecipeError for names of layers or parameters that the model does not have.
    """
    trainable = assembly_spec(resolved).trainable
    if trainable.is_all:
        return resolved.n_parameters
    model = meta_model_of(resolved)
    trainable.apply(model, resolved.recipe.seed)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
