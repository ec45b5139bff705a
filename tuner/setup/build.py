"""What training works with, built from a resolved recipe: the model, the optimizer, the batches."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tuner.config.eval_tasks import LOWER_IS_BETTER, task_of
from tuner.config.methods import DistillMethod, head_of
from tuner.config.recipe import LowRankAdapter, Recipe
from tuner.data.batches import GlobalBatches
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PackedRows, PreparedData
from tuner.errors import RecipeError
from tuner.model.build import build_model, is_part, meta_model, position_limit
from tuner.model.documents import Padding
from tuner.model.flops import training_flops
from tuner.model.freeze import select_modules
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import LogitTransform
from tuner.model.probe import Read, RouteRefused, are_there, prove_route, require_isolation
from tuner.model.root import CausalLM, Route, embedding_parameters, outer_parameters, trained_parameters
from tuner.model.trainable import TrainableSpec
from tuner.model.vetting import require_known_losses, weighs_routers
from tuner.model.weight_files import vet_weights
from tuner.parallel.assemble import AssemblySpec, Kernels, Recompute, assemble
from tuner.parallel.mesh import DeviceMeshes, Mesh, MeshSpec
from tuner.rundir.layout import EMA_PREFIX, MODEL_PREFIX
from tuner.runtime import startup
from tuner.runtime.device import DeviceFacts, measured_peak
from tuner.runtime.dist import RankInfo
from tuner.runtime.memory import keep_freed_memory
from tuner.runtime.process import Collective, device_index, gloo_group
from tuner.runtime.warned import pass_on
from tuner.setup import proven
from tuner.setup.hashes import FrozenHash, known_weights_hash
from tuner.setup.probes import probe_inputs
from tuner.setup.resolve import Resolved, check_division, model_spec, quantize_of, reference_of, rerouted, takes_several
from tuner.setup.settled import changed, rows_at_once
from tuner.setup.timetable import Starts, Timetable, timetable
from tuner.setup.weight_facts import Built, WeightFacts
from tuner.train.evaluate import HeldOut, check_metric, held_out
from tuner.train.guard import Guard
from tuner.train.methods.method import build_method, check_logits
from tuner.train.optimizer import build_optimizer
from tuner.train.progress import Criterion, MfuMeter
from tuner.train.step import StepConfig, TrainState
from tuner.train.step_parts import StepPart, Unscaled

if TYPE_CHECKING:
    from tuner.model.adapter import LoraSpec
    from tuner.model.unread import UnreadWeights
    from tuner.setup.initial import Initial

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HALF = {"BF16": torch.bfloat16, "F16": torch.float16}
"""By the names of safetensors: what float32 holds exactly."""
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The type of autocast by `train.precision`; under fp8, of all but the products that are made in it."""


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
    mesh: Mesh
    facts: WeightFacts
    teacher_facts: WeightFacts | None
    """Of the teacher that is in memory, where there is one."""
    probes: list[torch.Tensor]
    held_out: HeldOut | None
    mfu: MfuMeter
    reference: Mapping[str, Any] | None = None
    """By what the reference's columns are known, where the rows have any."""
    teacher: Mapping[str, Any] | None = None
    """The same of a teacher's."""

    @property
    def keeps(self) -> Criterion | None:
        """What the best checkpoint is chosen by, where the recipe keeps it."""
        recipe = self.resolved.recipe
        metric = recipe.checkpoint.keep_best
        if metric is not None and task_of(metric, recipe.eval.tasks) is not None:
            return Criterion.of_task(metric, metric.split("/")[2] in LOWER_IS_BETTER)
        return Criterion.of(metric, recipe.method.figures)


def build(
    resolved: Resolved,
    prepared: PreparedData,
    tokenizer: TextTokenizer,
    rank_info: RankInfo,
    starts: Starts = Starts(),  # noqa: B008 - frozen
) -> Assembly:
    """Build model, optimizer, batches and schedule. Collective where there are several processes."""
    recipe = resolved.recipe
    mesh = mesh_of(recipe, rank_info)
    check_fits(tokenizer, resolved.config, prepared)
    check_logits(recipe.method, LogitTransform.of(resolved.config))
    rows = rows_at_once(recipe)
    check_division(recipe, rank_info.world_size)
    table, held = timetable(recipe, prepared, starts), held_out_rows(recipe, prepared)
    if task_of(recipe.checkpoint.keep_best, recipe.eval.tasks) is None:
        check_metric(recipe.checkpoint.keep_best, held, recipe.method.figures)
    index = device_index(rank_info) if resolved.facts.kind == "cuda" else 0
    computed = "tf32" if recipe.train.tf32 and recipe.train.precision == "fp32" else recipe.train.precision
    peak = None if computed == "fp8" else measured_peak(resolved.facts.kind, computed, index)  # while memory is free
    (root, facts), step_config = assemble_model(resolved, rank_info, mesh)
    if root.route != resolved.route:  # what its structure tells is not what it computes
        resolved = rerouted(resolved, root.route, str(facts.why_apart))
        recipe = resolved.recipe
    if recipe.prober.steps:
        select_modules(root.model, recipe.prober.modules, "prober.modules")  # before anything is written
    train_state = build_train_state(recipe, root, step_config)
    train_state.rng_start = starts.rng
    if rank_info.is_main:
        _tell_touched(root)
    teacher_facts = None
    if (method := teacher_in_memory(recipe)) is not None:
        train_state.method.teacher, teacher_facts = assemble_teacher(resolved, method, step_config)
    batches = GlobalBatches(
        prepared.train,
        seed=recipe.seed,
        shuffle=recipe.data.shuffle,
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=rows,
        rank=mesh.data_rank,
        world_size=mesh.data_size,
        window=starts.window,
        by_document=train_state.method.by_document,
        mismatched=train_state.method.mismatched,
    )
    return Assembly(
        resolved=resolved,
        train_state=train_state,
        batches=batches,
        timetable=table,
        prepared=prepared,
        tokenizer=tokenizer,
        rank_info=rank_info,
        mesh=mesh,
        facts=facts,
        teacher_facts=teacher_facts,
        probes=probes_of(recipe, _probed(recipe, prepared)),
        held_out=held,
        mfu=MfuMeter(training_flops(train_state.root.model), peak, train_state.method.extra_forwards, mesh.row_holders),
    )


def probes_of(recipe: Recipe, rows: PackedRows) -> list[torch.Tensor]:
    """The beginnings of rows, int64 each, whose logits checkpoints record: of a score, the ends."""
    return probe_inputs(rows, from_end=head_of(recipe.method) == "score")


def _probed(recipe: Recipe, prepared: PreparedData) -> PackedRows:
    """Rows whose beginnings a checkpoint records logits of. Bases to merge into are compared on held-out ones."""
    is_compared = recipe.model.quantize != "none"
    return prepared.eval if is_compared and prepared.eval is not None else prepared.train


def build_train_state(recipe: Recipe, root: CausalLM, step_config: StepConfig) -> TrainState:
    """What a step changes, around the model of a resolved recipe: the loss, the optimizer and the guard."""
    parameters = trained_parameters(root)
    outer, embeddings = outer_parameters(root), embedding_parameters(root)
    touched = root.parts.touched_rows
    optimizer = build_optimizer(recipe.optimizer, parameters, outer, embeddings, recipe.seed, touched)
    guard = Guard(step_config.device, recipe.train.nonfinite, recipe.train.skip_spikes)
    in_fp16 = recipe.train.precision == "fp16"
    # Liger's kernel rounds a gradient before it is weighed, and scaled: in fp16 small ones would be zeros by then.
    root.complete(loss_kernel=KERNELS["torch" if in_fp16 and recipe.model.kernels == "liger" else recipe.model.kernels])
    require_known_losses(root.model.config)
    if recipe.model.router_aux_loss_coef or weighs_routers(root.model.config):
        from tuner.model.router_loss import router_loss

        root.complete(router_loss=router_loss(root.model, recipe.model.router_aux_loss_coef))
    scaling = Unscaled()
    if in_fp16:
        from tuner.train.loss_scale import LossScale  # most runs have none

        scaling = LossScale(step_config.device)
    parts = tuple(_step_parts(recipe, root, parameters, step_config))
    method = build_method(recipe.method)
    return TrainState(root, parameters, optimizer, step_config, guard, method, scaling, parts)


def _step_parts(
    recipe: Recipe, root: CausalLM, parameters: Mapping[str, nn.Parameter], step_config: StepConfig
) -> Iterator[StepPart]:
    """What a recipe's steps do besides, in the order in which it is asked; most recipes ask for none."""
    if root.parts.touched_rows:
        from tuner.train.row_gradients import RowGradients

        yield RowGradients(root.parts.touched_rows, step_config.mesh, step_config.device)
    if root.parts.router_loss is not None:
        from tuner.train.routing import Routing

        yield Routing(root.parts.router_loss, step_config.mesh)
    if recipe.ema.is_on:
        from tuner.train.ema import Ema, decay_of

        yield Ema(root, parameters, float(decay_of(recipe.ema) or 0.0), EMA_PREFIX, recipe.ema.evaluate)


def assemble_model(resolved: Resolved, rank_info: RankInfo, mesh: Mesh) -> tuple[Built, StepConfig]:
    """The model as a training starts with it, and how it computes. Collective where there are several processes."""
    device = _device(resolved.facts, rank_info)
    if device.type == "cpu":
        keep_freed_memory(resolved.facts.free_bytes // 2)
    else:
        from tuner.model.flash_versions import use_flash_version  # with the kernels of GPUs

        use_flash_version(resolved.config, device)
    built = assembled(resolved, assembly_spec(resolved), mesh, device)
    return built, step_config_of(resolved.recipe, device, mesh)


def assembled(resolved: Resolved, spec: AssemblySpec, mesh: Mesh, device: torch.device) -> Built:
    """The model of a resolved recipe, made as the spec says. Collective where there are several processes."""
    if mesh.size > 1 or device.type != "cpu":
        return _handed_on(resolved, spec, mesh, device)
    initial = _initial(resolved, spec)
    inspected = _Inspected(resolved, initial)
    return Built(assemble(spec, _whole_model(resolved, initial), inspect=inspected.note), inspected.facts)


def teacher_in_memory(recipe: Recipe) -> DistillMethod | None:
    """The method of a recipe where it learns from a model that is there in training."""
    method = recipe.method
    return method if isinstance(method, DistillMethod) and method.top_k is None else None


def assemble_teacher(resolved: Resolved, method: DistillMethod, step_config: StepConfig) -> Built:
    """The teacher of a resolved recipe, in evaluation mode. Collective where there are several processes."""
    from tuner.setup.teacher import blaming_teacher, teacher_of

    with blaming_teacher():
        taught = teacher_of(resolved, method)
        built = assembled(taught, teacher_spec(taught), step_config.mesh, step_config.device)
    built.root.eval()
    return built


def teacher_spec(taught: Resolved) -> AssemblySpec:
    """What is made of a teacher: nothing of it is trained, computed again or compiled."""
    spec = replace(assembly_spec(taught), trainable=TrainableSpec(nothing=True), rounded_to=None)
    return replace(spec, recompute="none", offload=False, tiles=False, padding=None, float8=False, rows=())


def require_groups(recipe: Recipe, rank_info: RankInfo) -> None:
    """Raise MachineError where so many processes do not divide into a recipe's groups, whichever way is sharded."""
    shard = "full" if recipe.parallel.shard == "auto" else recipe.parallel.shard
    mesh_of(changed(recipe, {"parallel.shard": shard}), rank_info)


def mesh_of(recipe: Recipe, rank_info: RankInfo) -> Mesh:
    """The processes of a launch as a resolved recipe lays them out."""
    parallel = recipe.parallel
    return Mesh.of(rank_info, MeshSpec(parallel.shard, parallel.tensor, parallel.sequence, parallel.expert))


def weight_parts(recipe: Recipe, rank_info: RankInfo) -> int:
    """Over how many processes a resolved recipe splits the weights of one copy of its model, and their state."""
    mesh = mesh_of(recipe, rank_info)
    return mesh.axes.get("shard", 1) * mesh.tensor


def step_config_of(recipe: Recipe, device: torch.device, mesh: Mesh) -> StepConfig:
    """How a resolved recipe computes on a device."""
    autocast = _autocast(device, recipe.train.precision)
    whole = recipe.parallel.accumulate == "whole"
    return StepConfig(device, autocast, recipe.train.max_grad_norm, recipe.seed, mesh, whole)


def held_out_rows(recipe: Recipe, prepared: PreparedData) -> HeldOut | None:
    """The held-out rows with the names of their sources: those of `data.eval`, or of what it is split from."""
    if prepared.eval is None:
        return None
    sources = recipe.data.eval if isinstance(recipe.data.eval, tuple) else recipe.data.train
    return held_out(prepared.eval, prepared.eval_documents, [source.path for source in sources])


def run_tensors(state: TrainState) -> dict[str, Any]:
    """The tensors of a checkpoint by name: trained parameters, the optimizer's state, the fp16 scale, averages."""
    model = {f"{MODEL_PREFIX}{name}": parameter.data for name, parameter in state.parameters.items()}
    return model | state.optimizer.state_tensors() | state.tensors()


def check_fits(tokenizer: TextTokenizer, config: PretrainedConfig, prepared: PreparedData) -> None:
    """Check that the model has an embedding for every id and a position for every token. Raises RecipeError."""
    text = config.get_text_config()
    if tokenizer.vocab_size > text.vocab_size:
        beyond = tokenizer.added_tokens_from(text.vocab_size)
        named = f" ({', '.join(beyond[:3])}{', ...' if len(beyond) > 3 else ''})" if beyond else ""
        hint = f"take the model's own tokenizer, or init: random with config: {{vocab_size: {tokenizer.vocab_size}}}"
        if [tokenizer.special_tokens.get("pad_token")] == beyond and tokenizer.vocab_size - text.vocab_size == 1:
            hint = "name a pad_token in tokenizer_config.json that the model has, such as its eos_token"
        raise RecipeError(
            f"tokenizer: its {tokenizer.vocab_size:,} ids are more than the model's {text.vocab_size:,} "
            f"embeddings{named}",
            hint=hint,
        )
    longest = position_limit(config)
    if longest is not None and prepared.train.max_length > longest:
        raise RecipeError(f"data.max_length: {prepared.train.max_length} is above the model's {longest:,} positions")


def assembly_spec(resolved: Resolved) -> AssemblySpec:
    """What a resolved recipe makes of the model."""
    recipe = resolved.recipe
    train = recipe.train
    longest = int(recipe.data.max_length)
    tokens = longest * rows_at_once(recipe)
    return AssemblySpec(
        trainable=trainable_of(recipe, resolved.new_ids),
        seed=recipe.seed,
        kernels=cast("Kernels", recipe.model.kernels),
        recompute=cast("Recompute", train.gradient_checkpointing),
        recomputed_layers=train.gradient_checkpointing_layers,
        offload=train.offload_activations is True,
        tiles=train.tiled_mlp is True,
        padding=Padding(tokens, longest) if train.compile is True else None,
        reshard_after_forward=recipe.parallel.reshard_after_forward,
        rounded_to=COMPUTED.get(train.precision) if recipe.adapter.kind == "none" else None,
        tokens=tokens,
        rows=tuple(pattern for item in recipe.optimizer.rows for pattern in item.match),
        step_tokens=longest * recipe.train.global_batch_size,
        quantize=quantize_of(recipe),
        float8=train.precision == "fp8",
        route=resolved.route,
    )


def trainable_of(recipe: Recipe, new_ids: range) -> TrainableSpec:
    """Which parameters a recipe trains; ``new_ids`` are those of the tokens that it adds."""
    lora = _lora_spec(recipe.adapter) if isinstance(recipe.adapter, LowRankAdapter) else None
    return TrainableSpec(lora, recipe.model.freeze, new_ids, recipe.model.init == "random")


def _lora_spec(adapter: LowRankAdapter) -> "LoraSpec":
    from tuner.model.adapter import LoraSpec

    return LoraSpec(
        adapter.r,
        adapter.alpha,
        adapter.dropout,
        adapter.target_modules,
        adapter.use_rslora,
        adapter.kind == "dora",
        adapter.modules_to_save,
        adapter.experts,
    )


def meta_model_of(resolved: Resolved, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model that is trained, without storage; in another type where one is given."""
    recipe = resolved.recipe
    return meta_model(resolved.config, dtype or DTYPES[recipe.model.dtype], head_of(recipe.method))


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


def _whole_model(
    resolved: Resolved,
    initial: "Initial | None",
    dtype: torch.dtype | None = None,
    unread: "UnreadWeights | None" = None,
) -> PreTrainedModel:
    """The model with its values, but for those that it takes note of as ``unread`` where such are asked for."""
    recipe = resolved.recipe
    spec = replace(model_spec(recipe, resolved.new_ids), unread=unread)
    model = build_model(spec, dtype or DTYPES[recipe.model.dtype], recipe.seed)
    if initial is not None:
        initial.give_weights(model)
    return model


def _initial(resolved: Resolved, spec: AssemblySpec) -> "Initial | None":
    """What gives the model weights from elsewhere, where the recipe names any."""
    if not resolved.recipe.model.init_from:
        return None
    from tuner.setup.initial import initial_of  # few trainings have any

    return initial_of(resolved, spec.trainable)


def _type_to_hand_on(resolved: Resolved, spec: AssemblySpec) -> torch.dtype | None:
    """The type of the files, where a model whose weights are read again, for a device or other processes, can have it.

    float32 holds those of a half type exactly, and they stay in the files until they are read: cast, they would all be
    in the host's memory. None where anything is made of the weights themselves: a hash of what is not
    trained, columns of a reference, rows of new tokens, what `model.init_from` gives.
    """
    recipe = resolved.recipe
    is_made_of = recipe.model.init_from or resolved.new_ids or reference_of(recipe.method) == "columns"
    if recipe.model.dtype != "fp32" or not spec.trainable.is_all or is_made_of or recipe.model.init == "random":
        return None
    stored = vet_weights(recipe.model.name_or_path, recipe.model.revision)
    return _HALF.get(stored.pop()) if len(stored) == 1 else None


def _handed_on(resolved: Resolved, spec: AssemblySpec, mesh: Mesh, device: torch.device) -> Built:
    """The model of a resolved recipe whose values go to a device other than the host's, or to several processes.

    Fused weights stay in the files until then, unless more is made of them: tiles are proven with all layers, and what
    `model.init_from` gives is put into the weights that are there.
    """
    from tuner.model.unread import UnreadWeights
    from tuner.parallel.values import bring, materialise  # one process on a CPU has the model where it was read to

    unread = None if spec.tiles or resolved.recipe.model.init_from else UnreadWeights()
    if mesh.size > 1:
        meshes = mesh.device_meshes(device.type)
        return _spread(resolved, spec, meshes, unread, partial(materialise, device=device, unread=unread))
    return _brought(resolved, spec, unread, partial(bring, device=device, unread=unread))


def _brought(
    resolved: Resolved, spec: AssemblySpec, unread: "UnreadWeights | None", bring: Callable[..., None]
) -> Built:
    """The model of one process, brought to its device."""
    initial = _initial(resolved, spec)
    stored = None if spec.tiles else _type_to_hand_on(resolved, spec)  # tiles are proven in the type that trains
    model = _whole_model(resolved, initial, stored, unread)
    types = {} if stored is None else _types_there(model, meta_model_of(resolved))
    inspected = _Inspected(resolved, initial, unread)
    root = assemble(spec, model, inspect=inspected.note, give_values=partial(bring, types=types))
    return Built(root, inspected.facts)


def _types_there(model: PreTrainedModel, meta: PreTrainedModel) -> dict[torch.Tensor, torch.dtype]:
    """The parameters and buffers of a model that have another type in the one that trains, with that type."""
    wanted = {name: one.dtype for name, one in [*meta.named_parameters(), *meta.named_buffers()]}
    own = [*model.named_parameters(), *model.named_buffers()]
    return {tensor: wanted[name] for name, tensor in own if tensor.dtype != wanted[name]}


def _spread(
    resolved: Resolved,
    spec: AssemblySpec,
    meshes: DeviceMeshes,
    unread: "UnreadWeights | None",
    materialise: Callable[..., None],
) -> Built:
    """Shards or a copy on every rank, filled from the model of rank 0, or from its files. Collective."""
    source: list[Built] = []  # on rank 0 alone; a failure there is raised on every rank, so that none waits for it

    def build_source() -> tuple[WeightFacts, Route]:
        initial = _initial(resolved, spec)
        inspected = _Inspected(resolved, initial, unread)
        model = _whole_model(resolved, initial, _type_to_hand_on(resolved, spec), unread)
        root = assemble(spec.for_values(), model, inspect=inspected.note)
        source.append(Built(root, inspected.facts))
        return replace(inspected.facts, frozen_hash=_on_rank_0), root.route

    facts, route = Collective(gloo_group()).on_rank0(build_source)
    root = assemble(
        replace(spec, route=route),
        meta_model_of(resolved),
        meshes=meshes,
        give_values=lambda root: materialise(root, source[0].root if source else None),
    )
    return Built(root, source[0].facts if source else facts)


def _on_rank_0() -> str | None:
    raise RuntimeError("the hash of frozen weights is rank 0's to give")


class _Inspected:
    """A model as it is looked at while it is whole, and what was found."""

    facts: WeightFacts

    def __init__(
        self, resolved: Resolved, initial: "Initial | None", unread: "UnreadWeights | None" = None
    ) -> None:
        self._resolved, self._initial, self._unread = resolved, initial, unread

    def note(self, root: CausalLM) -> None:
        """Prove that each document is computed as if alone, and begin to hash what its weights are known by."""
        resolved, recipe, unread = self._resolved, self._resolved.recipe, self._unread
        if self._initial is not None:
            self._initial.give_rest(root.model)
        with startup.phase("checks"):
            why_apart = _prove(resolved, root, are_there if unread is None else partial(unread.read, root.model))
        if recipe.adapter.kind != "none":
            _tell_left_out(root, recipe.model.quantize != "none")
        untouched = weights_hash = None
        if is_part(root.model):
            from tuner.model.multimodal import untouched_facts

            untouched = untouched_facts(meta_model_of(resolved), recipe.model.name_or_path, recipe.model.revision)
        if reference_of(recipe.method) == "columns":
            weights_hash = known_weights_hash(root.model, recipe.data.cache_dir, unread)
        self.facts = WeightFacts(
            FrozenHash(root.model, recipe.data.cache_dir, resolved.facts.kind, unread),
            weights_hash,
            untouched,
            resolved.given if self._initial is None else self._initial.noted(),
            why_apart,
        )


def _prove(resolved: Resolved, root: CausalLM, read: Read) -> str | None:
    """Have the root go by a route that is proven, now or by a launch before; why it left its own, where it did."""
    recipe, packed = resolved.recipe, takes_several(resolved.recipe)
    vocab_size, longest = resolved.config.get_text_config().vocab_size, int(recipe.data.max_length)
    cache = None if recipe.data.cache_dir is None else Path(recipe.data.cache_dir)
    key = proven.key_of(resolved, root, longest, packed)
    if (verdict := proven.known(key, cache)) is not None:
        root.go_by(verdict.route)
        startup.remark("documents were proven apart before")
        return verdict.why_apart
    why_apart = None
    if recipe.data.packing is True:
        try:
            require_isolation(root, vocab_size, packed, longest, read=read)
        except RouteRefused as error:
            hint = "write data.packing: auto, which takes documents otherwise where they cannot lie end to end"
            raise RecipeError(error.message, hint=hint) from error
    else:
        why_apart = prove_route(root, vocab_size, packed, longest, read)
    proven.keep(key, proven.Verdict(root.route, why_apart), cache)
    return why_apart


def _tell_touched(root: CausalLM) -> None:
    """Warn of embeddings that are updated by rows where a step may touch all of them."""
    for name, touched in root.parts.touched_rows.items():
        if touched.most >= (rows := touched.embedding.num_embeddings):
            tokens = f"a global batch has up to {touched.most:,} tokens and {name} {rows:,} rows"
            pass_on(f"optimizer.rows saves little here: {tokens}; leave it out, or take smaller batches")


def _tell_left_out(root: CausalLM, is_quantized: bool) -> None:
    from tuner.model.adapter import left_out_experts

    if (left_out := left_out_experts(root.model)) is not None:
        pass_on(left_out)
    if is_quantized:
        from tuner.model.quantize.layers import left_whole

        if (whole := left_whole(root.model)) is not None:
            pass_on(whole)


def _device(facts: DeviceFacts, rank_info: RankInfo) -> torch.device:
    return torch.device("cuda", device_index(rank_info)) if facts.kind == "cuda" else torch.device("cpu")


def _autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[object]]:
    if precision == "fp32":
        return contextlib.nullcontext
    # A pass uses each weight once: kept, the rounded copies of all layers would outlive what recomputing frees.
    return lambda: torch.autocast(device.type, dtype=COMPUTED[precision], cache_enabled=False)
