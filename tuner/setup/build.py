"""What training works with, built from a resolved recipe: the model, the optimizer, the batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuner.config.eval_tasks import LOWER_IS_BETTER, task_of
from tuner.config.numbers import StepRange
from tuner.config.recipe import DataSection, PeftAdapter, Recipe
from tuner.data.batches import GlobalBatches
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.model.flops import training_flops
from tuner.model.freeze import select_modules
from tuner.model.kernels import KERNELS
from tuner.model.output_layer import LogitTransform
from tuner.model.root import CausalLM, embedding_parameters, outer_parameters, trained_parameters
from tuner.model.vetting import require_known_losses, weighs_routers
from tuner.parallel.mesh import Mesh
from tuner.rundir.layout import EMA_PREFIX, MODEL_PREFIX
from tuner.runtime.device import measured_peak, target
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import device_index
from tuner.runtime.warned import pass_on
from tuner.setup.model import WeightFacts, load_teacher, load_training_model, teacher_in_memory
from tuner.setup.probes import probed_rows, probes_of
from tuner.setup.resolve import Resolved, check_division, check_fits, rerouted
from tuner.setup.settled import rows_at_once
from tuner.setup.specs import mesh_of
from tuner.setup.timetable import Starts, Timetable, timetable
from tuner.train.evaluate import HeldOut, check_metric, held_out
from tuner.train.guard import Guard, GuardLimits
from tuner.train.methods.method import build_method, check_logits
from tuner.train.optimizer import build_optimizer
from tuner.train.progress import Criterion, MfuMeter
from tuner.train.step import StepConfig, TrainState
from tuner.train.step_parts import NoLossScale, StepPart


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
    steps_to_skip: tuple[StepRange, ...]
    """Steps in which nothing is trained."""
    first_only: bool
    """Whether every step has the rows of the first one."""
    reference: Mapping[str, Any] | None = None
    """What identifies the reference model whose columns the rows have; None without columns."""
    teacher: Mapping[str, Any] | None = None
    """The same of the teacher whose columns the rows have."""

    @property
    def keeps(self) -> Criterion | None:
        """What the best checkpoint is chosen by, where the recipe keeps it."""
        recipe, metric = self.resolved.recipe, self.resolved.recipe.checkpoint.keep_best
        if metric is not None and task_of(metric, recipe.eval.tasks) is not None:
            return Criterion(metric, "lower" if metric.split("/")[2] in LOWER_IS_BETTER else "higher")
        return Criterion.of(metric, recipe.method.figures)


def build(
    resolved: Resolved, prepared: PreparedData, tokenizer: TextTokenizer, rank_info: RankInfo,
    starts: Starts = Starts(),  # noqa: B008 - frozen
) -> Assembly:
    """Build model, optimizer, batches and schedule. Collective where there are several processes."""
    recipe, mesh = resolved.recipe, mesh_of(resolved.recipe.parallel, rank_info)
    check_fits(tokenizer, resolved.config, prepared)
    check_logits(recipe.method, LogitTransform.of(resolved.config))
    check_division(recipe, rank_info.world_size)
    table, held = timetable(resolved, prepared, starts), held_out_rows(recipe.data, prepared)
    if task_of(recipe.checkpoint.keep_best, recipe.eval.tasks) is None:
        check_metric(recipe.checkpoint.keep_best, held, recipe.method.figures)
    index = device_index(rank_info) if resolved.facts.kind == "cuda" else 0
    products = resolved.numerics.products
    peak = None if products == "fp8" else measured_peak(resolved.facts.kind, products, index)  # while memory is free
    (root, facts), step_config = load_training_model(resolved, rank_info)
    if root.layout.route != resolved.route:  # what its structure tells is not what it computes
        resolved = rerouted(resolved, root.layout.route, str(facts.why_apart))
    if recipe.prober.steps:
        select_modules(root.model, recipe.prober.modules, "prober.modules")  # before anything is written
    train_state = build_train_state(resolved, root, step_config)
    train_state.rng_start = starts.rng
    if rank_info.is_main:
        _tell_touched(root)
    teacher_facts = None
    if (method := teacher_in_memory(resolved)) is not None:
        train_state.method.teacher, teacher_facts = load_teacher(resolved, method, step_config)
    batches = GlobalBatches(
        prepared.train, seed=recipe.seed, shuffle=recipe.data.shuffle, global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=rows_at_once(recipe.train), rank=mesh.data_rank, world_size=mesh.data_size,
        sizes=table.plan.sizes, portion=starts.portion, by_document=train_state.method.by_document,
        mismatched=train_state.method.mismatched,
    )
    return Assembly(
        resolved=resolved, train_state=train_state, batches=batches, timetable=table, prepared=prepared,
        tokenizer=tokenizer, rank_info=rank_info, mesh=mesh, facts=facts, teacher_facts=teacher_facts,
        probes=probes_of(resolved, probed_rows(recipe, prepared)), held_out=held,
        mfu=MfuMeter(training_flops(train_state.root.model), peak, train_state.method.extra_forwards, mesh.row_holders),
        steps_to_skip=recipe.train.steps_to_skip, first_only=recipe.train.overfit_first_batch,
    )


def build_train_state(resolved: Resolved, root: CausalLM, step_config: StepConfig) -> TrainState:
    """What a step changes, around the model of a resolved recipe: the loss, the optimizer and the guard."""
    recipe, parameters = resolved.recipe, trained_parameters(root)
    outer, embeddings = outer_parameters(root), embedding_parameters(root)
    touched = root.parts.touched_rows
    optimizer = build_optimizer(recipe.optimizer, parameters, outer, embeddings, recipe.seed, touched)
    guard = Guard(step_config.device, GuardLimits.of(recipe.train))
    in_fp16 = recipe.train.precision == "fp16"
    # Liger's kernel rounds a gradient before it is weighed, and scaled: in fp16 small ones would be zeros by then.
    kernels = resolved.settled.get("loss", recipe.model.kernels)
    kernels = "torch" if in_fp16 and kernels == "liger" else kernels
    root.parts.set_once(loss_kernel=KERNELS[kernels])
    require_known_losses(root.model.config)
    if (z := recipe.model.router_z_loss_coef) or recipe.model.router_aux_loss_coef or weighs_routers(root.model.config):
        from tuner.model.router_loss import router_loss

        root.parts.set_once(router_loss=router_loss(root.model, recipe.model.router_aux_loss_coef, z_weight=z))
    scaling: NoLossScale = NoLossScale()
    if in_fp16:
        from tuner.train.loss_scale import LossScale  # most runs have none

        scaling = scaled = LossScale(step_config.device)
        root.parts.set_once(gradient_scale=scaled.of_term)
    parts = tuple(_step_parts(recipe, root, parameters, step_config))
    return TrainState(root, parameters, optimizer, step_config, guard, build_method(recipe.method), scaling, parts)


def _step_parts(
    recipe: Recipe, root: CausalLM, parameters: Mapping[str, nn.Parameter], step_config: StepConfig
) -> Iterator[StepPart]:
    """The optional parts of a recipe's steps, in the order in which they are called; most recipes ask for none."""
    if root.parts.touched_rows:
        from tuner.train.row_adamw import RowGradients

        yield RowGradients(root.parts.touched_rows, step_config.mesh, step_config.device)
    if target(next(iter(parameters.values()))) == "cuda":  # on a CPU no kernel is launched
        from tuner.train.grouped_gradients import GroupedGradients

        yield GroupedGradients(parameters)
    if root.parts.router_loss is not None:
        from tuner.train.routing import Routing

        yield Routing(root.parts.router_loss, step_config.mesh, recipe.model.router_balance)
    if isinstance(recipe.adapter, PeftAdapter) and recipe.adapter.config["peft_type"] == "ADALORA":
        from tuner.train.rank_allocation import RankAllocation

        yield RankAllocation(root.model, step_config.mesh.size)
    if recipe.ema.is_on:
        from tuner.train.ema import Ema, decay_of

        yield Ema(root, parameters, float(decay_of(recipe.ema) or 0.0), EMA_PREFIX, recipe.ema.evaluate)


def held_out_rows(data: DataSection, prepared: PreparedData) -> HeldOut | None:
    """The held-out rows with the names of their sources: those of `data.eval`, or of what it is split from."""
    if prepared.eval is None:
        return None
    sources = data.eval if isinstance(data.eval, tuple) else data.train
    held = held_out(prepared.eval, prepared.eval_documents, [source.name for source in sources])
    held.samples = prepared.samples
    return held


def run_tensors(state: TrainState) -> dict[str, Any]:
    """The tensors of a checkpoint by name: trained parameters, the optimizer's state, the fp16 scale, averages."""
    model = {f"{MODEL_PREFIX}{name}": parameter.data for name, parameter in state.parameters.items()}
    return model | state.optimizer.state_tensors() | state.tensors()


def _tell_touched(root: CausalLM) -> None:
    """Warn of embeddings that are updated by rows where a step may touch all of them."""
    for name, touched in root.parts.touched_rows.items():
        if touched.most >= (rows := touched.embedding.num_embeddings):
            tokens = f"a global batch has up to {touched.most:,} tokens and {name} {rows:,} rows"
            pass_on(f"optimizer.rows saves little here: {tokens}; leave it out, or take smaller batches")
