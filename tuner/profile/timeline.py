"""From a trace's changes to what a prediction shows: parts, fullest moments, and what each layer keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.profile.cuda_allocator import Allocator, Block, CachingAllocator, ExpandableAllocator
from tuner.profile.prediction import PARTS, MemoryTimeline, Moment, Part
from tuner.profile.tracing import Trace

if TYPE_CHECKING:
    from tuner.profile.allocations import Storage

ROOT = "model."
"""The model's name in the module that is trained, which is left out."""


def memory_timeline(
    trace: Trace, always: Mapping[Part, int], expandable: bool = False, by_tensors: bool = False
) -> MemoryTimeline:
    """The timeline of a trace, with bytes that are ``always`` there added to it.

    On CUDA it is what the allocator holds, with ``expandable`` segments or without. ``by_tensors`` takes the moments at
    which most is asked of it, with the most that it holds in the same turn: what is asked grows evenly with the layers,
    and at which of two moments that ask for nearly as much it holds more does not.
    """
    parts, names = parts_of(trace), _names(trace)
    allocator: Allocator = ExpandableAllocator() if expandable else CachingAllocator()
    held = _held(trace, allocator) if trace.target == "cuda" else None
    now: dict[Part, int] = {**dict.fromkeys(PARTS, 0), **always}
    host: dict[Part, int] = {}
    host_peak: dict[Part, int] = {}
    moments: list[Moment] = []
    for number, change in enumerate(trace.changes):
        if held is not None and trace.storages[change.storage].host:
            host[parts[change.storage]] = host.get(parts[change.storage], 0) + change.delta
            host_peak = max(host_peak, dict(host), key=lambda sizes: sum(sizes.values()))
            continue
        now[parts[change.storage]] += change.delta
        if number + 1 < trace.marks[0][1]:
            continue
        if held is not None:
            now["rounding"] = held[number] - (sum(now.values()) - now["rounding"] - sum(always.values()))
        moment = Moment(change.phase, names[change.module], dict(now))
        if not moments or (moments[-1].phase, moments[-1].module) != (moment.phase, moment.module):
            moments.append(moment)
        else:
            moments[-1] = _fullest(moments[-1], moment, by_tensors)
    return MemoryTimeline(tuple(moments), _kept(trace, parts, names), host_peak)


def _fullest(one: Moment, other: Moment, by_tensors: bool) -> Moment:
    """The fuller of two moments, the first of equal ones."""
    if not by_tensors:
        return other if other.total > one.total else one
    held = max(one.total, other.total)
    more, asked = max(((it, it.total - it.parts["rounding"]) for it in (one, other)), key=lambda pair: pair[1])
    return replace(more, parts={**more.parts, "rounding": held - asked})


def parts_of(trace: Trace) -> list[Part]:
    """The part of each of the trace's storages: what it was assigned, or what its lifetime tells."""
    kept = _living_at(trace, "backward", "forward")
    gradients = _living_at(trace, "forward", "backward") | _living_at(trace, "optimizer", "backward")

    def part(number: int, storage: Storage) -> Part:
        if storage.part is not None:
            return storage.part
        if number in gradients:
            return "gradients"
        if storage.phase == "forward" and not storage.module:
            return "loss"
        return "activations" if number in kept or storage.recomputed else "other"

    return [part(number, storage) for number, storage in enumerate(trace.storages)]


def _living_at(trace: Trace, mark: str, phase: str) -> set[int]:
    """Storages made in a phase that are there at a mark of this name."""
    found: set[int] = set()
    living: set[int] = set()
    ends = {at for name, at in trace.marks if name == mark}
    for number, change in enumerate(trace.changes):
        if number in ends:
            found |= living
        if trace.storages[change.storage].phase == phase:
            (living.add if change.delta > 0 else living.discard)(change.storage)
    return found | living if len(trace.changes) in ends else found


def _names(trace: Trace) -> dict[str, str]:
    """Each module's name as it is shown: that of the decoder layer that it lies in, as transformers names it."""

    def shown(module: str) -> str:
        layer = next((block for block in trace.blocks if f"{module}.".startswith(f"{block}.")), module)
        return layer.removeprefix(ROOT)

    return {module: shown(module) for module in {change.module for change in trace.changes}}


def _kept(trace: Trace, parts: Sequence[Part], names: Mapping[str, str]) -> dict[str, int]:
    """Activations that are there when the last microbatch's backward pass begins, by layer."""
    last = max((number for number, (name, _) in enumerate(trace.marks) if name == "forward"), default=0)
    start, end = trace.marks[last][1], trace.marks[last + 1][1]
    found = dict.fromkeys([*(block.removeprefix(ROOT) for block in trace.blocks), ""], 0)
    for change in trace.changes[start:end]:
        if parts[change.storage] == "activations":
            name = names[trace.storages[change.storage].module]
            found[name if name in found else ""] += change.delta
    return found


def _held(trace: Trace, allocator: Allocator) -> list[int]:
    """Bytes of the device that the allocator holds after each change."""
    sizes: dict[int, int] = {}
    blocks: dict[int, Block] = {}
    held = []
    for change in trace.changes:
        if trace.storages[change.storage].host:
            held.append(allocator.held)
            continue
        sizes[change.storage] = size = sizes.get(change.storage, 0) + change.delta
        if change.storage in blocks:
            allocator.free(blocks.pop(change.storage))
        if size > 0:
            blocks[change.storage] = allocator.allocate(size)
        held.append(allocator.held)
    return held
