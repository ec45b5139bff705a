"""Memory and time of a recipe on a device that need not be here, before anything runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from tuner.config.recipe import Recipe
from tuner.data.building.spec import resolve_max_length
from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks
from tuner.model.kernels import has_liger
from tuner.model.offload import IN_FLIGHT
from tuner.model.probe import RouteRefused
from tuner.profile.devices import Device, stated_error
from tuner.profile.estimate import StepSetting, estimate, seconds_of
from tuner.profile.prediction import PARTS, MemoryMoment, MemoryTimeline, Part, Phase, Prediction, largest_first
from tuner.profile.timeline import expands_segments, memory_timeline
from tuner.profile.tracing import StepTrace, trace_step
from tuner.profile.traffic import Traffic
from tuner.profile.workload import Workload, added_ids, workload
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.setup.resolve import Resolved, check_division, rerouted, resolve, sends_again
from tuner.setup.settled import changed, without_prediction
from tuner.setup.specs import step_sections, task_sections
from tuner.setup.timetable import timetable

MIB = 1 << 20
CONTEXT_BYTES = {"cuda": 600 * MIB, "cpu": 600 * MIB}
"""CUDA's context with torch's kernels and the workspace of cuBLAS; on a CPU, Python with torch and transformers."""
COMMUNICATOR_BYTES = {1: 400 * MIB, 2: 1024 * MIB}
"""Buffers of NCCL among the processes of one machine, and of several."""
GLOO_THREADS = 2
ERRORS = {"cpu": 0.02, "cuda": 0.05, "compiled": 0.1}
"""The stated error of a peak, as a share of it, where none was measured on the device."""


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
    """Predict a recipe; what `auto` leaves to a prediction has the value it has where nothing is predicted.

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
    is_copied = task_sections(resolved).checkpoint.async_save is True  # the state, for a save in the background
    always, constants = _constants(is_copied, trace, rank_info)
    expandable = device.kind == "cuda" and expands_segments(os.environ)
    timeline = memory_timeline(trace, always, expandable, by_tensors=layers is not None)
    if device.kind != "cpu" and is_copied:
        timeline = replace(timeline, host={**timeline.host, "staging": trace.staged})
    total_steps, place = _total_steps(resolved, work), StepSetting(device, rank_info, work)
    kind = "compiled" if wants_compiled(recipe, resolved, device) else device.kind
    return Prediction(
        device=device.shown, device_kind=device.kind, processes=rank_info.world_size,
        local_processes=rank_info.local_world_size,
        memory=replace(timeline, moments=(*timeline.moments, *_others(trace, timeline, rank_info))),
        limit_bytes=target.limit_bytes, error=stated_error(device.shown) or ERRORS[kind],
        time=estimate(step_sections(resolved), trace.flops, trace.sizes, trace.traffic, place, total_steps),
        assumptions=(*work.assumptions, *assumptions, *constants, *_of_host(timeline, target)),
        host_limit_bytes=target.host_limit_bytes,
    )


def _traced(recipe: Recipe, resolved: Resolved, device: Device, rank_info: RankInfo, work: Workload) -> StepTrace:
    compiled = device.kind == "cuda" and wants_compiled(recipe, resolved, device)
    return trace_step(resolved, rank_info, work.batches, work.held_out, work.samples, compiled)


def resolved_for(recipe: Recipe, target: Target) -> tuple[Resolved, tuple[str, ...]]:
    """The recipe as it would be resolved on the target; layers that are compiled are taken as with fused kernels."""
    kind, rank_info = target.device.kind, target.rank_info
    own = {"train.device": kind, "train.compile": False, "parallel.processes": rank_info.local_world_size}
    there = changed(recipe, own)
    max_length, facts = resolve_max_length(recipe.model, recipe.data), target.device.facts()
    resolved = resolve(there, max_length, rank_info, facts=facts)
    new_ids, assumed = added_ids(recipe, resolved.config)
    if new_ids:
        resolved = resolve(there, max_length, rank_info, new_ids, facts)
    assumptions = [*assumed]
    if (attention := resolved.reasons.get("attention")) is not None:
        assumptions.append(f"attention is computed by {attention}")
    if recipe.parallel.expert > 1:
        assumptions.append("every expert is assumed to get as many tokens as any other: one that gets more needs more")
    if wants_compiled(recipe, resolved, target.device):
        once = ", and one copy of what is cast several times" if kind == "cuda" else ""
        assumptions.append(f"compiled layers are assumed to keep as much as liger's kernels do{once}")
    if kind == "cuda" and not has_liger(resolved.config.model_type):
        assumptions.append(f"liger-kernel has no kernels for {resolved.config.model_type} here: predicted with torch's")
    return resolved, tuple(assumptions)


def wants_compiled(recipe: Recipe, resolved: Resolved, device: Device) -> bool:
    """Whether the decoder layers would be compiled on a device, had it all that this takes."""
    if sends_again(recipe):
        return False
    if recipe.train.compile == "auto":
        return device.kind == "cuda" and recipe.data.packs_rows and resolved.route == "flat"
    return recipe.train.compile


def _constants(is_copied: bool, trace: StepTrace, rank_info: RankInfo) -> tuple[Mapping[Part, int], tuple[str, ...]]:
    """Bytes that are there from start to end, and in words what they are taken to be.

    ``is_copied``: a save in the background keeps a copy of the state.
    """
    kind = trace.target
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
    if kind == "cpu" and is_copied:
        always["staging"] = trace.staged
        said.append("checkpoint.async_save keeps a copy of the state to save")
    elif is_copied:
        said.append(
            f"checkpoint.async_save keeps a copy of the state in {gib(trace.staged)} of the host's page-locked memory"
        )
    return always, tuple(said)


def _of_host(timeline: MemoryTimeline, target: Target) -> tuple[str, ...]:
    """What is kept on the host, and how much of it there may be, in words."""
    if not timeline.host or target.host_limit_bytes is None:
        return ()
    parts = largest_first(timeline.host)
    whose = "given" if target.host_bytes is not None else "taken for such a device"
    return (f"the host's memory holds {parts}, of {gib(target.host_limit_bytes)} {whose}",)


def _held_by_gloo(trace: StepTrace) -> int:
    """The largest buffers of collectives, one for each thread: it lets go of them after whoever waits has gone on."""
    sizes = [storage.size for storage in trace.storages if storage.part in {"gathered", "reduced"}]
    return sum(sorted(sizes)[-GLOO_THREADS:])


def _others(trace: StepTrace, timeline: MemoryTimeline, rank_info: RankInfo) -> list[MemoryMoment]:
    """Moments before and after steps: the model being built, a checkpoint being saved, and one being loaded."""
    first = timeline.moments[0]
    kept: dict[Part, int] = {part: first.parts[part] for part in ("parameters", "constants", "staging")}
    state: dict[Part, int] = {**kept, "optimizer": first.parts["optimizer"]}
    whole = trace.largest * (2 if rank_info.world_size > 1 else 1)  # one tensor at a time, and its shards beside it
    return [_moment("build", {**kept, "other": whole}), _moment("saving", state), _moment("resuming", state)]


def _moment(phase: Phase, parts: Mapping[Part, int]) -> MemoryMoment:
    return MemoryMoment(phase, "", {**dict.fromkeys(PARTS, 0), **parts})


def _total_steps(resolved: Resolved, work: Workload) -> int | None:
    """The steps of the run where they are known: from prepared rows, or from a duration in steps or tokens."""
    train = step_sections(resolved).train
    duration = train.duration
    if work.prepared is not None:
        return timetable(resolved, work.prepared).plan.total_steps
    if duration.unit == "steps":
        return int(duration.count)
    if duration.unit == "tokens":
        return max(1, round(duration.count / (work.tokens_per_row * train.global_batch_size)))
    return None


MomentKey = tuple[int, Phase, str, str]


@dataclass(frozen=True)
class Ends:
    """Layers at the start of a pass, and as many at its end, in which it may differ from all others."""

    layers: int

    @property
    def fewer(self) -> int:
        """Layers of the smaller of the two models that are traced: those of the ends alone."""
        return 2 * self.layers

    @property
    def more(self) -> int:
        """Layers of the larger one."""
        return self.fewer + 1

    @classmethod
    def of(cls, recipe: Recipe) -> Ends:
        """Those of a recipe: weights are gathered for the next layer, inputs leave for the host over the next few."""
        return cls(1 + (IN_FLIGHT if recipe.train.offload_activations is True else 1))

    def place(self, number: int, count: int) -> str | None:
        """Where one of so many layers lies: counted from the start or from the end; None between."""
        if number < self.layers:
            return f"layer {number}"
        return f"layer -{count - number}" if number >= count - self.layers else None


def predict_by_layers(recipe: Recipe, target: Target, layers: int, prepared: Path | None = None) -> Prediction:
    """What `predict` says of a model whose ``layers`` are alike, from two shorter traces.

    Where these do not go through the same moments, or the model has few layers, it is predicted whole. Raises as
    `predict`.
    """
    ends = Ends.of(recipe)
    if layers <= ends.fewer + ends.more or str(recipe.train.gradient_checkpointing_layers) != "100%":
        return predict(recipe, target, prepared)
    few, more = (predict(recipe, target, prepared, layers=count) for count in (ends.fewer, ends.more))
    if (pairs := _aligned(few.memory, more.memory, ends)) is None:
        return predict(recipe, target, prepared)
    further = layers - ends.more
    moments = tuple(replace(one, parts=_parts(one.parts, other.parts, further)) for one, other in pairs)
    memory = MemoryTimeline(moments, {}, _grown(few.memory.host, more.memory.host, further))
    flops = {name: _line(value, more.time.flops[name], further) for name, value in few.time.flops.items()}
    fewer, others = vars(few.time.traffic), vars(more.time.traffic)
    traffic = Traffic(**{name: round(_line(size, others[name], further)) for name, size in fewer.items()})
    busy_s = _line(few.time.busy_s, more.time.busy_s, further)
    time = replace(more.time, flops=flops, traffic=traffic, busy_s=busy_s, step_s=seconds_of(busy_s, traffic))
    return replace(more, memory=memory, time=time)


def _line(few: float, more: float, further: int) -> float:
    """The value with so many layers more than the larger model, of what grows evenly."""
    return more + (more - few) * further


def _parts(few: Mapping[Part, int], more: Mapping[Part, int], further: int) -> dict[Part, int]:
    """The bytes of a moment; what the allocator rounds comes from how blocks fall, and grows as the root of the rest.

    A line through two such figures would multiply their chance difference by the number of layers.
    """
    asked = _grown(few, {part: size for part, size in more.items() if part != "rounding"}, further)
    growth = sum(asked.values()) / max(1, sum(more.values()) - more["rounding"])
    return {**asked, "rounding": round((few["rounding"] + more["rounding"]) / 2 * growth**0.5)}


def _grown(few: Mapping[Part, int], more: Mapping[Part, int], further: int) -> dict[Part, int]:
    return {part: max(0, round(_line(few.get(part, 0), size, further))) for part, size in more.items()}


def _aligned(few: MemoryTimeline, more: MemoryTimeline, ends: Ends) -> list[tuple[MemoryMoment, MemoryMoment]] | None:
    """The same moments of both; None where one goes through others."""
    ones, others = _keyed(few, ends), _keyed(more, ends)
    if {key: len(moments) for key, moments in ones.items()} != {key: len(moments) for key, moments in others.items()}:
        return None
    return [pair for key, moments in ones.items() for pair in zip(moments, others[key], strict=True)]


def _keyed(timeline: MemoryTimeline, ends: Ends) -> dict[MomentKey, list[MemoryMoment]]:
    """The moments by their pass, phase, place, and the place of the layer before; without those of layers between."""
    names = [name for name in timeline.layers if name]
    places = {name: ends.place(number, len(names)) for number, name in enumerate(names)}
    found: dict[MomentKey, list[MemoryMoment]] = {}
    number, phase, after = 0, None, ""
    for moment in timeline.moments:
        if moment.phase != phase:
            number, phase, after = number + 1, moment.phase, ""
        place = places.get(moment.module, moment.module)
        if moment.module in places:
            after = place or "between"
        if place is not None and after != "between":
            found.setdefault((number, moment.phase, place, after), []).append(moment)
    return found


def layers_alike(model: PreTrainedModel) -> int:
    """The number of a model's decoder layers where all are alike; 0 where they are not, or cannot be found."""
    try:
        blocks = decoder_blocks(model)
    except RecipeError:
        return 0
    shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in block.state_dict().items()] for block in blocks]
    count, config = len(blocks), model.config.get_text_config()
    if config.num_hidden_layers != count or any(other != shapes[0] for other in shapes):
        return 0
    return count if all(len(set(map(str, values))) == 1 for _, values in _by_layer(config)) else 0


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """The config of a model with fewer layers, which are like the first ones of this."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    for name, values in list(_by_layer(text)):
        setattr(text, name, list(values[:count]))
    text.num_hidden_layers = count
    return shorter


def _by_layer(config: PretrainedConfig) -> Iterator[tuple[str, Sequence[Any]]]:
    """What a config lists for each layer."""
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            yield name, value
