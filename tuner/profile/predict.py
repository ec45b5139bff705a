"""Memory and time of a recipe on a device that need not be here, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tuner.config.recipe import Recipe
from tuner.data.building.spec import resolve_max_length
from tuner.model.flops import FROZEN, TRAINED, Flops
from tuner.model.kernels import has_liger
from tuner.model.probe import RouteRefused
from tuner.profile.cuda_allocator import expands_segments
from tuner.profile.devices import Device
from tuner.profile.prediction import PARTS, MemoryTimeline, Moment, Part, Phase, Prediction, TimeEstimate
from tuner.profile.timeline import memory_timeline
from tuner.profile.tracing import Trace, trace_step
from tuner.profile.traffic import Traffic
from tuner.profile.workload import Workload, added_ids, workload
from tuner.runtime.device import measured_peak
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.setup.resolve import Resolved, check_division, rerouted, resolve
from tuner.setup.settled import rows_at_once, without_prediction
from tuner.setup.timetable import timetable

MIB = 1 << 20
CONTEXT_BYTES = {"cuda": 600 * MIB, "cpu": 600 * MIB}
"""CUDA's context with torch's kernels and the workspace of cuBLAS; on a CPU, Python with torch and transformers."""
COMMUNICATOR_BYTES = {1: 400 * MIB, 2: 1024 * MIB}
"""Buffers of NCCL among the processes of one machine, and of several."""
GLOO_THREADS = 2
ERRORS = {"cpu": 0.02, "cuda": 0.05, "compiled": 0.1}
"""The stated error of a peak, as a share of it."""
REACHED = 0.4
"""Share of the rate of large products: published full steps on H100 reach 33 to 46 % of the data sheet's."""
HALF_REACHED = 512
"""Tokens of a microbatch at which a device reaches half of what it reaches with many."""
AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of the forward pass of a layer that is computed again in its backward pass."""
LINKS = {"machine": 300e9, "network": 25e9}
"""Bytes a second that a process gets from others: of its own machine, and over the network."""


@dataclass(frozen=True)
class Target:
    """Where a recipe would run: a device, how many processes there are, and the memory that each may take."""

    device: Device
    rank_info: RankInfo
    limit_bytes: int


def predict(recipe: Recipe, target: Target, prepared: Path | None = None) -> Prediction:
    """Predict a recipe; what is left to a prediction itself is taken as where there is none.

    Its prepared data are looked for, unless a directory of them is given. Raises RecipeError where it cannot be trained
    at all, whatever the memory.
    """
    rank_info, device = target.rank_info, target.device
    recipe = without_prediction(recipe)
    check_division(recipe.train.global_batch_size, rows_at_once(recipe), rank_info.world_size)
    resolved, assumptions = resolved_for(recipe, target)
    work = workload(recipe, resolved, rank_info, prepared)
    try:
        trace = _traced(recipe, resolved, device, rank_info, work)
    except RouteRefused as error:  # as training finds when it proves the model
        resolved = rerouted(resolved, "batch", error.why)
        work = workload(recipe, resolved, rank_info, prepared)
        trace = _traced(recipe, resolved, device, rank_info, work)
    if (apart := resolved.reasons.get("packing")) is not None:
        assumptions = (*assumptions, apart)
    always, constants = _constants(resolved, trace, rank_info)
    timeline = memory_timeline(trace, always, device.kind == "cuda" and expands_segments(os.environ))
    total_steps = _total_steps(resolved.recipe, work)
    return Prediction(
        device=device.shown,
        device_kind=device.kind,
        processes=rank_info.world_size,
        local_processes=rank_info.local_world_size,
        memory=MemoryTimeline((*timeline.moments, *_others(trace, timeline, rank_info)), timeline.layers),
        limit_bytes=target.limit_bytes,
        error=ERRORS["compiled" if wants_compiled(recipe, resolved, device) else device.kind],
        time=estimate(resolved.recipe, trace, device, rank_info, work, total_steps),
        assumptions=(*work.assumptions, *assumptions, *constants),
    )


def _traced(recipe: Recipe, resolved: Resolved, device: Device, rank_info: RankInfo, work: Workload) -> Trace:
    compiled = device.kind == "cuda" and wants_compiled(recipe, resolved, device)
    return trace_step(resolved, rank_info, work.batches, work.held_out, work.samples, compiled)


def resolved_for(recipe: Recipe, target: Target) -> tuple[Resolved, tuple[str, ...]]:
    """The recipe as it would be resolved on the target; layers that are compiled are taken as with fused kernels."""
    kind, rank_info = target.device.kind, target.rank_info
    train = recipe.train.model_copy(update={"device": kind, "compile": False})
    parallel = recipe.parallel.model_copy(update={"processes": rank_info.local_world_size})
    there = recipe.model_copy(update={"train": train, "parallel": parallel})
    max_length, facts = resolve_max_length(recipe.model, recipe.data), target.device.facts()
    resolved = resolve(there, max_length, rank_info, facts=facts)
    new_ids, assumed = added_ids(recipe, resolved.config)
    if new_ids:
        resolved = resolve(there, max_length, rank_info, new_ids, facts)
    assumptions = [*assumed]
    if (attention := resolved.reasons.get("attention")) is not None:
        assumptions.append(f"attention is computed by {attention}")
    if wants_compiled(recipe, resolved, target.device):
        once = ", and one copy of what is cast several times" if kind == "cuda" else ""
        assumptions.append(f"compiled layers are assumed to keep as much as liger's kernels do{once}")
    if kind == "cuda" and not has_liger(resolved.config.model_type):
        assumptions.append(f"liger-kernel has no kernels for {resolved.config.model_type} here: predicted with torch's")
    return resolved, tuple(assumptions)


def wants_compiled(recipe: Recipe, resolved: Resolved, device: Device) -> bool:
    """Whether the decoder layers would be compiled on a device, had it all that this takes."""
    if recipe.train.compile == "auto":
        return device.kind == "cuda" and recipe.data.packs_rows and resolved.route == "flat"
    return recipe.train.compile


def _constants(resolved: Resolved, trace: Trace, rank_info: RankInfo) -> tuple[Mapping[Part, int], tuple[str, ...]]:
    """Bytes that are there from start to end, and in words what they are taken to be."""
    recipe, kind = resolved.recipe, resolved.facts.kind
    size = CONTEXT_BYTES[kind]
    said = [f"{'CUDA context and workspaces' if kind == 'cuda' else 'the process (Python, torch)'}: {size // MIB} MiB"]
    if kind == "cpu":
        said.append("RSS counts mapped weight files on top of this, which the system drops where memory is short")
    if kind == "cuda" and rank_info.world_size > 1:
        buffers = COMMUNICATOR_BYTES[1 if rank_info.world_size == rank_info.local_world_size else 2]
        size += buffers
        said.append(f"NCCL's buffers: {buffers // MIB} MiB")
    always: dict[Part, int] = {"constants": size}
    if kind == "cpu" and rank_info.world_size > 1 and (held := _held_by_gloo(trace)):
        always["constants"] += held
        said.append(f"gloo's threads may hold what they sent a moment longer: {held / MIB:,.1f} MiB")
    if kind == "cpu" and recipe.checkpoint.async_save is True:
        always["staging"] = trace.staged
        said.append("checkpoint.async_save keeps a copy of the state to save")
    elif recipe.checkpoint.async_save is True:
        said.append(
            f"checkpoint.async_save keeps a copy of the state in {gib(trace.staged)} of the host's page-locked memory"
        )
    return always, tuple(said)


def _held_by_gloo(trace: Trace) -> int:
    """The largest buffers of collectives, one for each thread: it lets go of them after whoever waits has gone on."""
    sizes = [storage.size for storage in trace.storages if storage.part in {"gathered", "reduced"}]
    return sum(sorted(sizes)[-GLOO_THREADS:])


def _others(trace: Trace, timeline: MemoryTimeline, rank_info: RankInfo) -> list[Moment]:
    """Moments before and after steps: the model being built, a checkpoint being saved, and one being loaded."""
    first = timeline.moments[0]
    kept: dict[Part, int] = {part: first.parts[part] for part in ("parameters", "constants", "staging")}
    state: dict[Part, int] = {**kept, "optimizer": first.parts["optimizer"]}
    whole = trace.largest * (2 if rank_info.world_size > 1 else 1)  # one tensor at a time, and its shards beside it
    return [_moment("build", {**kept, "other": whole}), _moment("saving", state), _moment("resuming", state)]


def _moment(phase: Phase, parts: Mapping[Part, int]) -> Moment:
    return Moment(phase, "", {**dict.fromkeys(PARTS, 0), **parts})


def _total_steps(recipe: Recipe, work: Workload) -> int | None:
    """The steps of the run where they are known: from prepared rows, or from a duration in steps or tokens."""
    duration = recipe.train.duration
    if work.prepared is not None:
        return timetable(recipe, work.prepared).plan.total_steps
    if duration.unit == "steps":
        return int(duration.count)
    if duration.unit == "tokens":
        return max(1, round(duration.count / (work.tokens_per_row * recipe.train.global_batch_size)))
    return None


@dataclass(frozen=True)
class Computing:
    """The arithmetic of a step of mean rows on one process: its seconds, and FLOPs of a microbatch by part."""

    seconds: float
    micro_batches: float
    flops: Mapping[str, float]
    basis: str


def computing(recipe: Recipe, flops: Flops, device: Device, rank_info: RankInfo, work: Workload) -> Computing:
    """Estimate the arithmetic of a step from the first microbatch of its workload; nothing is traced for it."""
    batch, tokens_per_row = work.batches.micro[0], work.tokens_per_row
    lengths, trained = batch.lengths, len(batch.trained_positions)
    train, tokens, rows = recipe.train, sum(lengths), rows_at_once(recipe)
    micro = max(1.0, train.global_batch_size / (rows * rank_info.world_size))
    share = rows * tokens_per_row / tokens
    parts = {name: value * share for name, value in flops.parts(lengths, trained).items()}
    again = AGAIN[train.gradient_checkpointing] * _forward_share(recipe) * _layers_share(recipe)
    parts["again"] = again * (parts["layers"] + parts["attention"])
    if work.extra_forwards:
        parts["extra"] = work.extra_forwards * flops.forward_of(lengths, trained) * share
    rate, basis = _rate(device, str(train.precision))
    reached = rate * REACHED * tokens * share / (tokens * share + HALF_REACHED)
    return Computing(micro * sum(parts.values()) / reached, micro, parts, basis)


def estimate(
    recipe: Recipe, trace: Trace, device: Device, rank_info: RankInfo, work: Workload, total_steps: int | None
) -> TimeEstimate:
    """The time of a step of mean rows: that of its arithmetic, at least that of its traffic."""
    computed = computing(recipe, trace.flops, device, rank_info, work)
    micro = computed.micro_batches
    traffic = _of_step(trace.traffic, ceil(micro))
    sent = traffic.gathered + traffic.reduced - traffic.far
    return TimeEstimate(
        flops={name: value * micro * rank_info.world_size for name, value in computed.flops.items()},
        tokens_per_step=work.tokens_per_row * recipe.train.global_batch_size,
        step_s=max(computed.seconds, sent / LINKS["machine"] + traffic.far / LINKS["network"]),
        total_steps=total_steps,
        basis=computed.basis,
        traffic=traffic,
    )


def _of_step(traced: Sequence[Traffic], n_micro: int) -> Traffic:
    """The traffic of so many microbatches: all are like the first but the last, which may reduce what they added up."""
    return traced[0] * (n_micro - 1) + traced[-1]


def _forward_share(recipe: Recipe) -> float:
    """The part of a layer's arithmetic that is its forward pass."""
    return 2 / (TRAINED if recipe.adapter.kind == "none" else FROZEN)


def _layers_share(recipe: Recipe) -> float:
    """The part of the layers that is computed again; all of them where they are counted out."""
    layers = recipe.train.gradient_checkpointing_layers
    return float(layers.share) if layers.unit == "%" else 1.0


def _rate(device: Device, precision: str) -> tuple[float, str]:
    if device.flops is None:
        return measured_peak(device.kind, precision), f"at {REACHED:.0%} of the rate of a matrix product measured here"
    rate = device.flops if precision == "bf16" else device.flops / 2
    return rate, f"at {REACHED:.0%} of the data sheet's {rate / 1e12:,.0f} TFLOP/s"
