"""Memory and time of a recipe on a device that need not be here, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.config.recipe import Recipe
from tuner.data.building.spec import resolve_max_length
from tuner.model.kernels import has_liger
from tuner.model.probe import RouteRefused
from tuner.profile.cuda_allocator import expands_segments
from tuner.profile.devices import Device
from tuner.profile.estimate import Place, estimate
from tuner.profile.layers import with_layers
from tuner.profile.prediction import PARTS, MemoryTimeline, Moment, Part, Phase, Prediction
from tuner.profile.timeline import memory_timeline
from tuner.profile.tracing import Trace, trace_step
from tuner.profile.words import largest_first
from tuner.profile.workload import Workload, added_ids, workload
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.setup.resolve import Resolved, check_division, rerouted, resolve, sends_again
from tuner.setup.settled import without_prediction
from tuner.setup.timetable import timetable

MIB = 1 << 20
CONTEXT_BYTES = {"cuda": 600 * MIB, "cpu": 600 * MIB}
"""CUDA's context with torch's kernels and the workspace of cuBLAS; on a CPU, Python with torch and transformers."""
COMMUNICATOR_BYTES = {1: 400 * MIB, 2: 1024 * MIB}
"""Buffers of NCCL among the processes of one machine, and of several."""
GLOO_THREADS = 2
ERRORS = {"cpu": 0.02, "cuda": 0.05, "compiled": 0.1}
"""The stated error of a peak, as a share of it."""


@dataclass(frozen=True)
class Target:
    """Where a recipe would run: a device, how many processes there are, and the memory that each may take."""

    device: Device
    rank_info: RankInfo
    limit_bytes: int
    host_bytes: int | None = None
    """What each process may take of the host's memory; None takes the device's share of it."""

    @property
    def host_limit_bytes(self) -> int | None:
        """What each process may take of the host's memory; None where that is the device's own."""
        if self.device.kind == "cpu":
            return None
        return self.device.host_bytes if self.host_bytes is None else self.host_bytes


def predict(recipe: Recipe, target: Target, prepared: Path | None = None, layers: int | None = None) -> Prediction:
    """Predict a recipe; what is left to a prediction itself is taken as where there is none.

    Its prepared data are looked for, unless a directory of them is given. With ``layers`` it is the model with so many
    of its layers alone. Raises RecipeError where it cannot be trained at all, whatever the memory.
    """
    rank_info, device = target.rank_info, target.device
    recipe = without_prediction(recipe)
    check_division(recipe, rank_info.world_size)
    resolved, assumptions = resolved_for(recipe, target)
    if layers is not None:
        resolved = replace(resolved, config=with_layers(resolved.config, layers))
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
    expandable = device.kind == "cuda" and expands_segments(os.environ)
    timeline = memory_timeline(trace, always, expandable, by_tensors=layers is not None)
    timeline = _with_host_copy(timeline, resolved, trace)
    total_steps = _total_steps(resolved.recipe, work)
    return Prediction(
        device=device.shown,
        device_kind=device.kind,
        processes=rank_info.world_size,
        local_processes=rank_info.local_world_size,
        memory=replace(timeline, moments=(*timeline.moments, *_others(trace, timeline, rank_info))),
        limit_bytes=target.limit_bytes,
        error=ERRORS["compiled" if wants_compiled(recipe, resolved, device) else device.kind],
        time=estimate(resolved.recipe, trace, Place(device, rank_info, work), total_steps),
        assumptions=(*work.assumptions, *assumptions, *constants, *_of_host(timeline, target)),
        host_limit_bytes=target.host_limit_bytes,
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
    if recipe.parallel.expert > 1:
        assumptions.append("every expert is taken to get as many tokens as any other: one that gets more needs more")
    if wants_compiled(recipe, resolved, target.device):
        once = ", and one copy of what is cast several times" if kind == "cuda" else ""
        assumptions.append(f"compiled layers are assumed to keep as much as liger's kernels do{once}")
    if kind == "cuda" and not has_liger(resolved.config.model_type):
        assumptions.append(f"liger-kernel has no kernels for {resolved.config.model_type} here: predicted with torch's")
    return resolved, tuple(assumptions)


def wants_compiled(recipe: Recipe, resolved: Resolved, device: Device) -> bool:
    """Whether the decoder layers would be compiled on a device, had it all that this takes."""
    if sends_again(resolved.recipe):
        return False
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


def _with_host_copy(timeline: MemoryTimeline, resolved: Resolved, trace: Trace) -> MemoryTimeline:
    """The timeline with the copy that a save in the background is written from, where that lies on the host."""
    if resolved.facts.kind == "cpu" or resolved.recipe.checkpoint.async_save is not True:
        return timeline
    return replace(timeline, host={**timeline.host, "staging": trace.staged})


def _of_host(timeline: MemoryTimeline, target: Target) -> tuple[str, ...]:
    """What is kept on the host, and how much of it there may be, in words."""
    if not timeline.host or target.host_limit_bytes is None:
        return ()
    parts = largest_first(timeline.host)
    whose = "given" if target.host_bytes is not None else "taken for such a device"
    return (f"the host's memory holds {parts}, of {gib(target.host_limit_bytes)} {whose}",)


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
