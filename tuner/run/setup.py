"""The assembly: the one place below the commands where the sections of the recipe meet."""

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, PretrainedConfig

from tuner.config.optimizers import MuonOptimizer
from tuner.config.recipe import LowRankAdapter, Recipe, rows_method
from tuner.data.batches import GlobalBatches
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MachineError, RecipeError
from tuner.model.adapter import LoraSpec
from tuner.model.build import (
    ModelSpec,
    apply_liger,
    apply_native,
    build_model,
    build_skeleton,
    decoder_blocks,
    generation_config,
    has_liger,
    model_config,
)
from tuner.model.choice import Choice
from tuner.model.compile import compile_blocks, compiler_problem
from tuner.model.flops import training_flops
from tuner.model.freeze import frozen_hash
from tuner.model.logit_shape import LogitShape
from tuner.model.native.library import native_problem
from tuner.model.padding import Padding
from tuner.model.probe import require_isolation
from tuner.model.recompute import apply_recompute
from tuner.model.root import CausalLM, outer_parameters, trained_parameters
from tuner.parallel.fsdp import data_mesh, materialise, shard, shard_size
from tuner.run.best import check_metric, mark_steps
from tuner.run.probes import probe_inputs
from tuner.run.resets import Starts
from tuner.runtime.allocator import keep_freed_memory
from tuner.runtime.collective import Collective
from tuner.runtime.device import DeviceFacts, device_facts, host_memory
from tuner.runtime.dist import RankInfo
from tuner.runtime.peak import measured_peak
from tuner.runtime.process import gloo_group
from tuner.train.evaluate import HeldOut, held_out
from tuner.train.guard import Guard, GuardPolicy
from tuner.train.methods import build_objective, check_logits
from tuner.train.mfu import MfuMeter
from tuner.train.optimizer import build_optimizer
from tuner.train.plan import Cadence, Plan, cadence, plan_steps
from tuner.train.schedule import Schedule, StartedLater, build_schedule
from tuner.train.step import StepConfig, TrainState

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL_MODEL_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Resolved:
    """A recipe without `auto`, the facts that decided, and the reason for each decision by key path."""

    recipe: Recipe
    facts: DeviceFacts
    config: PretrainedConfig
    generation: GenerationConfig
    n_parameters: int
    reasons: Mapping[str, str]
    new_ids: range = range(0)
    """Of the tokens that the recipe adds."""


@dataclass(frozen=True)
class Timetable:
    """The computed course of a run."""

    plan: Plan
    schedule: Schedule
    peak_lr: float
    evaluation: Cadence
    saving: Cadence
    marks: frozenset[int]
    """Steps whose checkpoints are never pruned."""
    exporting: Cadence
    """An export needs a checkpoint: each of its steps is one of `saving`, too."""
    data_start: int = 0
    """The steps behind which the rows began anew."""


@dataclass(frozen=True)
class Assembly:
    """Everything that the loop needs, built."""

    resolved: Resolved
    train_state: TrainState
    batches: GlobalBatches
    timetable: Timetable
    prepared: PreparedData
    tokenizer: TextTokenizer
    rank_info: RankInfo
    probes: list[torch.Tensor]
    held_out: HeldOut | None
    effort: MfuMeter


def resolve(
    recipe: Recipe, max_length: int, rank_info: RankInfo, new_ids: range = range(0), facts: DeviceFacts | None = None
) -> Resolved:
    """Replace every `auto` of the recipe by a value, with the reason; looks at the device and the model's config.

    ``new_ids`` are those that the tokenizer gave to the tokens that the recipe adds: the config has room for them. With
    ``facts`` it is resolved for a device that need not be here.
    """
    facts = facts or device_facts(recipe.train.device, rank_info.local_rank)
    spec = _spec(recipe, new_ids)
    config = model_config(spec)
    n_parameters = sum(p.numel() for p in build_skeleton(config, torch.float32).parameters())
    reasons: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {}

    def settle(section: str, key: str, value: object, reason: str) -> None:
        if getattr(getattr(recipe, section), key) == "auto":
            values.setdefault(section, {})[key] = value
            reasons[f"{section}.{key}"] = reason

    settle("train", "device", facts.kind, facts.name)
    settle("train", "mock_batch", facts.kind == "cuda", facts.kind)
    settle("checkpoint", "async_save", *_saves_beside(recipe, facts, n_parameters, rank_info))
    precision = recipe.train.precision
    if precision == "auto":
        precision = "bf16" if facts.bf16_fast else "fp32"
        settle("train", "precision", precision, f"bf16 is {'fast' if facts.bf16_fast else 'slow'} on this {facts.kind}")
    frozen = recipe.adapter.kind != "none"
    settle("model", "dtype", precision if frozen else "fp32", "frozen weights" if frozen else "trained weights")
    settle("train", "compile", *_compiled(recipe, facts))
    if recipe.model.kernels == "auto":
        settle("model", "kernels", *_kernels(config.model_type, facts))
    settle("optimizer", "lr", *_default_lr(recipe, n_parameters))
    if isinstance(recipe.optimizer, MuonOptimizer):
        lr = values.get("optimizer", {}).get("lr", recipe.optimizer.lr)
        settle("optimizer", "adamw_lr", lr, "that of lr")
    settle("parallel", "processes", rank_info.world_size, "as started")
    machines = rank_info.world_size > rank_info.local_world_size
    settle("parallel", "shard", "hybrid" if machines else "full", "several machines" if machines else "one machine")
    settle("data", "max_length", max_length, "as prepared")
    kind = rows_method(recipe.method).kind
    settle("data", "too_long", "drop" if kind == "sft" else "split", kind)
    changed = {section: getattr(recipe, section).model_copy(update=update) for section, update in values.items()}
    done = recipe.model_copy(update=changed)
    _check_numerics(done, facts)
    return Resolved(done, facts, config, generation_config(spec, config), n_parameters, reasons, new_ids)


def _kernels(model_type: str, facts: DeviceFacts) -> tuple[str, str]:
    """Whose kernels compute, and why."""
    if facts.kind == "cuda":
        return "liger" if has_liger(model_type) else "torch", f"{model_type} on {facts.kind}"
    problem = native_problem()
    return ("native", "compiled for this CPU") if problem is None else ("torch", problem)


def _saves_beside(recipe: Recipe, facts: DeviceFacts, n_parameters: int, rank_info: RankInfo) -> tuple[bool, str]:
    """Whether saves are written beside the steps, and why. On a CPU they would take the cores that training uses."""
    if facts.kind == "cpu" or recipe.adapter.kind != "none":
        return facts.kind != "cpu", facts.kind
    state = 3 * 4 * n_parameters * rank_info.local_world_size // rank_info.world_size  # weights and moments in float32
    fits = state < host_memory()[1] // 2
    return fits, facts.kind if fits else "too little memory of the host for copies"


def _compiled(recipe: Recipe, facts: DeviceFacts) -> tuple[bool, str]:
    """Whether decoder layers are compiled, and why. Raises MachineError where they shall be and cannot."""
    problem = compiler_problem(facts.kind)
    if recipe.train.compile == "auto":
        if facts.kind != "cuda" or problem is not None:
            return False, problem or facts.kind
        return recipe.data.packing, facts.kind if recipe.data.packing else "rows of many lengths"
    if recipe.train.compile and problem is not None:
        raise MachineError(f"train.compile: {problem}", hint="install what is missing, or write compile: false")
    return recipe.train.compile, "as written"


def _check_numerics(recipe: Recipe, facts: DeviceFacts) -> None:
    """Raise MachineError or RecipeError where a resolved recipe wants kernels or types that are not to be had."""
    frozen = recipe.adapter.kind != "none"
    if recipe.model.kernels == "liger" and facts.kind != "cuda":
        raise MachineError("model.kernels: liger needs a CUDA device", hint="write kernels: auto or torch")
    if recipe.model.kernels == "native" and facts.kind != "cpu":
        raise MachineError("model.kernels: native kernels are for the CPU", hint="write kernels: auto, liger or torch")
    if not frozen and recipe.model.dtype != "fp32":
        raise RecipeError(
            "model.dtype: trained weights are kept in fp32",
            hint="write dtype: auto; train.precision sets the computation",
        )
    if frozen and recipe.model.dtype == "bf16" and recipe.train.precision == "fp32":
        raise RecipeError(
            "model.dtype: bf16 weights cannot be computed with in train.precision: fp32",
            hint="write dtype: auto, or precision: bf16",
        )


def timetable(recipe: Recipe, prepared: PreparedData, starts: Starts = Starts()) -> Timetable:  # noqa: B008 - frozen
    """The steps of a resolved recipe over prepared data; a schedule that was reset runs over the steps behind that.

    Raises RecipeError for a duration that cannot be.
    """
    tokens = prepared.train.tokens_per_row
    plan = plan_steps(recipe.train.duration, tokens, recipe.train.global_batch_size)
    if plan.total_steps <= max(starts.schedule, starts.data, starts.rng):
        raise RecipeError(f"train.duration: no steps of {plan.total_steps} are left", hint="lengthen it")
    schedule: Schedule
    if starts.schedule:
        rest = replace(plan, total_steps=plan.total_steps - starts.schedule)
        schedule = StartedLater(build_schedule(recipe.schedule, rest, tokens), starts.schedule)
    else:
        schedule = build_schedule(recipe.schedule, plan, tokens)
    evaluated = prepared.eval is not None
    exporting = cadence(recipe.export.every, plan, tokens)
    return Timetable(
        plan,
        schedule,
        float(recipe.optimizer.lr),
        cadence(recipe.eval.every if evaluated else None, plan, tokens),
        cadence(recipe.checkpoint.every, plan, tokens).or_of(exporting),
        mark_steps(recipe.checkpoint.marks, plan, tokens),
        exporting,
        starts.data,
    )


def assemble(
    resolved: Resolved,
    prepared: PreparedData,
    tokenizer: TextTokenizer,
    rank_info: RankInfo,
    starts: Starts = Starts(),  # noqa: B008 - frozen
) -> Assembly:
    """Build model, optimizer, batches and schedule. Collective where there are several processes."""
    recipe = resolved.recipe
    _check_sizes(recipe, tokenizer, resolved.config, prepared, rank_info)
    table, held = timetable(recipe, prepared, starts), held_out_rows(recipe, prepared)
    check_metric(recipe.checkpoint.keep_best, held)
    peak = measured_peak(resolved.facts.kind, recipe.train.precision, rank_info.local_rank)  # while the memory is free
    train_state = build_train_state(recipe, *assemble_model(resolved, rank_info))
    train_state.rng_start = starts.rng
    batches = GlobalBatches(
        prepared.train,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=recipe.train.micro_batch_size,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
    )
    probes = probe_inputs(prepared.train)
    effort = MfuMeter(training_flops(train_state.root.model), peak)
    return Assembly(resolved, train_state, batches, table, prepared, tokenizer, rank_info, probes, held, effort)


def build_train_state(recipe: Recipe, root: CausalLM, step_config: StepConfig) -> TrainState:
    """What a step changes, around the model of a resolved recipe: the loss, the optimizer and the guard."""
    parameters = trained_parameters(root)
    optimizer = build_optimizer(recipe.optimizer, parameters, outer_parameters(root))
    policy = GuardPolicy(recipe.train.nonfinite, recipe.train.skip_spikes)
    root.objective = build_objective(recipe.method, recipe.model.kernels)
    return TrainState(root, parameters, optimizer, step_config, Guard(policy, step_config.device))


def assemble_model(resolved: Resolved, rank_info: RankInfo) -> tuple[CausalLM, StepConfig]:
    """The model as a training starts with it, and how it computes. Collective where there are several processes."""
    recipe = resolved.recipe
    if resolved.facts.kind == "cpu":
        keep_freed_memory(resolved.facts.free_bytes // 2)
    root = _build_root(resolved, rank_info, packed=recipe.data.packing or recipe.train.micro_batch_size > 1)
    return root, step_config_of(recipe, _device(resolved.facts, rank_info), rank_info.rank)


def step_config_of(recipe: Recipe, device: torch.device, rank: int) -> StepConfig:
    """How a resolved recipe computes on a device."""
    autocast = _autocast(device, recipe.train.precision)
    return StepConfig(device, autocast, recipe.train.max_grad_norm, recipe.seed, rank)


def held_out_rows(recipe: Recipe, prepared: PreparedData) -> HeldOut | None:
    """The held-out rows with the names of their sources: those of `data.eval`, or of what it is split from."""
    if prepared.eval is None:
        return None
    sources = recipe.data.eval if isinstance(recipe.data.eval, tuple) else recipe.data.train
    return held_out(prepared.eval, prepared.eval_documents, [source.path for source in sources])


def _spec(recipe: Recipe, new_ids: range) -> ModelSpec:
    model = recipe.model
    return ModelSpec(model.name_or_path, model.revision, model.init == "random", model.config, new_ids)


def lora_spec(adapter: LowRankAdapter) -> LoraSpec:
    """The adapter section as the model package takes it."""
    return LoraSpec(
        adapter.r,
        adapter.alpha,
        adapter.dropout,
        adapter.target_modules,
        adapter.use_rslora,
        adapter.kind == "dora",
        adapter.modules_to_save,
    )


def _choice(resolved: Resolved) -> Choice:
    recipe = resolved.recipe
    lora = lora_spec(recipe.adapter) if isinstance(recipe.adapter, LowRankAdapter) else None
    return Choice(lora, recipe.model.freeze, resolved.new_ids, recipe.model.init == "random")


def _default_lr(recipe: Recipe, n_parameters: int) -> tuple[float, str]:
    if recipe.adapter.kind != "none":
        return 2e-4, "adapter"
    if recipe.model.init == "random":
        return 3e-4, "random weights"
    if n_parameters < SMALL_MODEL_PARAMETERS:
        return 1e-4, f"full, {n_parameters / 1e6:,.0f} M parameters"
    return 2e-5, f"full, {n_parameters / 1e9:,.1f} B parameters"


def _build_root(resolved: Resolved, rank_info: RankInfo, packed: bool) -> CausalLM:
    """The whole model on rank 0, or one process; with several, shards everywhere filled from rank 0's."""
    recipe = resolved.recipe
    dtype = DTYPES[recipe.model.dtype]
    device, chosen = _device(resolved.facts, rank_info), _choice(resolved)
    built: list[CausalLM] = []  # on rank 0 alone; a failure there is raised on every rank, so that none waits for it

    def build() -> str | None:
        built.append(CausalLM(build_model(_spec(recipe, resolved.new_ids), dtype, recipe.seed)))
        chosen.apply(built[0].model, recipe.seed)
        if recipe.model.kernels == "native":
            apply_native(built[0].model)
        vocab_size, longest = resolved.config.get_text_config().vocab_size, int(recipe.data.max_length)
        require_isolation(built[0], vocab_size, packed, longest, recipe.train.micro_batch_size)
        return frozen_hash(built[0].model)

    frozen = Collective(gloo_group()).on_rank0(build)
    if rank_info.world_size == 1:
        root = built[0].to(device)
        _adapt_blocks(root, recipe)
    else:
        root = bare_root(resolved)
        shard(root, launch_mesh(recipe, rank_info, device.type), recipe.parallel.reshard_after_forward)
        materialise(root, built[0] if built else None, device)
    root.frozen_hash = frozen
    if recipe.model.kernels == "liger" and recipe.train.compile is not True:  # the compiler makes kernels of its own
        apply_liger(root.model)
    return root


def bare_root(resolved: Resolved) -> CausalLM:
    """The model as it is trained, but for its values and before it is sharded: on the meta device, without storage."""
    root = CausalLM(build_skeleton(resolved.config, DTYPES[resolved.recipe.model.dtype]))
    _choice(resolved).apply(root.model, resolved.recipe.seed)
    if resolved.recipe.model.kernels == "native":
        apply_native(root.model)
    _adapt_blocks(root, resolved.recipe)
    return root


def launch_mesh(recipe: Recipe, rank_info: RankInfo, device: str) -> DeviceMesh:
    """The processes of a launch as `parallel.shard` arranges them. Collective."""
    return data_mesh(device, rank_info.world_size, shard_size(recipe.parallel.shard, rank_info))


def _adapt_blocks(root: CausalLM, recipe: Recipe) -> None:
    """Have decoder layers computed again in the backward pass, and compiled, as the recipe wants."""
    level, wish = recipe.train.gradient_checkpointing, recipe.train.gradient_checkpointing_layers
    if level != "none":
        there = len(decoder_blocks(root.model))
        wanted = math.ceil(wish.share * there) if wish.unit == "%" else int(wish.count)
        if wanted > there:
            raise RecipeError(f"train.gradient_checkpointing_layers: {wish}, but the model has {there}")
        apply_recompute(root, level, wanted)
    if recipe.train.compile is True:
        longest = int(recipe.data.max_length)
        compile_blocks(root, Padding(longest * recipe.train.micro_batch_size, longest))


def check_fits(tokenizer: TextTokenizer, config: PretrainedConfig, prepared: PreparedData) -> None:
    """Check that the model has an embedding for every id and a position for every token. Raises RecipeError."""
    text = config.get_text_config()
    if tokenizer.vocab_size > text.vocab_size:
        beyond = tokenizer.added_tokens_from(text.vocab_size)
        named = f" ({', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''})" if beyond else ""
        hint = f"take the model's own tokenizer, or init: random with config: {{vocab_size: {tokenizer.vocab_size}}}"
        if tokenizer.special_tokens.get("pad_token") in beyond:
            hint = "name a pad_token in tokenizer_config.json that the model has, such as its eos_token"
        raise RecipeError(
            f"tokenizer: its {tokenizer.vocab_size:,} ids are more than the model's {text.vocab_size:,} "
            f"embeddings{named}",
            hint=hint,
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and prepared.train.max_length > longest:
        raise RecipeError(f"data.max_length: {prepared.train.max_length} is above the model's {longest:,} positions")


def _check_sizes(
    recipe: Recipe, tokenizer: TextTokenizer, config: PretrainedConfig, prepared: PreparedData, rank_info: RankInfo
) -> None:
    check_fits(tokenizer, config, prepared)
    check_logits(recipe.method, LogitShape.of(config))
    check_division(recipe.train.global_batch_size, recipe.train.micro_batch_size, rank_info.world_size)


def check_division(global_batch_size: int, micro_batch_size: int, processes: int) -> None:
    """Raise RecipeError, listing what would do, where a global batch does not divide into whole micro-batches."""
    if global_batch_size % (micro_batch_size * processes):
        numbers = range(1, min(global_batch_size, 64) + 1)
        allowed = [n for n in numbers if global_batch_size % (micro_batch_size * n) == 0]
        raise RecipeError(
            f"train.global_batch_size: {global_batch_size} rows do not divide into {processes} processes of "
            f"{micro_batch_size} rows",
            hint=f"numbers of processes (parallel.processes) that divide it: {', '.join(map(str, allowed))}",
        )


def _device(facts: DeviceFacts, rank_info: RankInfo) -> torch.device:
    return torch.device("cuda", rank_info.local_rank) if facts.kind == "cuda" else torch.device("cpu")


def _autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[object]]:
    if precision == "fp32":
        return contextlib.nullcontext
    # A pass uses each weight once: kept, the bf16 copies of all layers would outlive what recomputing frees.
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
