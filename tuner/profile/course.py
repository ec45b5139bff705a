"""From a trace's changes to what a prediction shows: parts, fullest moments, and what each layer keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.profile.prediction import PARTS, MemoryCourse, Moment, Part, Phase
from tuner.profile.segments import Block, CachingAllocator, is_small
from tuner.profile.tracing import Trace

if TYPE_CHECKING:
    from tuner.profile.ledger import Change, Entry

ROOT = "model."
"""The model's name in the module that is trained, which is left out."""


def course_of(trace: Trace, always: Mapping[Part, int]) -> MemoryCourse:
    """The course of a trace, with bytes that are ``always`` there beside it."""
    parts = parts_of(trace)
    names = _names(trace)
    held = _held(trace) if trace.target == "cuda" else None
    last = max((number for number, (name, _) in enumerate(trace.marks) if name == "forward"), default=0)
    now: dict[Part, int] = {**dict.fromkeys(PARTS, 0), **always}
    timeline: list[Moment] = []
    place: tuple[Phase, str] | None = None
    best = -1
    for number, change in enumerate(trace.changes):
        now[parts[change.serial]] += change.delta
        if number + 1 < trace.marks[0][1]:
            continue
        if held is not None:
            now["rounding"] = held[number] - (sum(now.values()) - now["rounding"] - sum(always.values()))
        here = (change.phase, names[change.module])
        if here != place:
            place, best = here, -1
            timeline.append(Moment(*here, dict(now)))
        if (total := sum(now.values())) > best:
            best = total
            timeline[-1] = Moment(*here, dict(now))
    return MemoryCourse(tuple(timeline), _kept(trace, parts, names, last))


def parts_of(trace: Trace) -> list[Part]:
    """The part of each of the trace's storages: what it was assigned, or what its life tells."""
    kept = _living_at(trace, "backward", "forward")
    grown = _living_at(trace, "forward", "backward") | _living_at(trace, "optimizer", "backward")
    return [_part(entry, serial in kept, serial in grown) for serial, entry in enumerate(trace.entries)]


def _part(entry: Entry, is_kept: bool, is_gradient: bool) -> Part:
    if entry.part is not None:
        return entry.part
    if is_gradient:
        return "gradients"
    if entry.phase == "forward" and not entry.module:
        return "loss"
    return "activations" if is_kept or entry.again else "other"


def _living_at(trace: Trace, mark: str, phase: str) -> set[int]:
    """Storages made in a phase that are there at a mark of this name."""
    found: set[int] = set()
    living: set[int] = set()
    ends = {at for name, at in trace.marks if name == mark}
    for number, change in enumerate(trace.changes):
        if number in ends:
            found |= living
        if trace.entries[change.serial].phase != phase:
            continue
        if change.delta > 0:
            living.add(change.serial)
        else:
            living.discard(change.serial)
    return found | living if len(trace.changes) in ends else found


def _names(trace: Trace) -> dict[str, str]:
    """Each module's name as it is shown: that of the decoder layer that it lies in, as transformers names it."""
    blocks = set(trace.blocks)

    def shown(module: str) -> str:
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            if ".".join(parts[:length]) in blocks:
                return ".".join(parts[:length]).removeprefix(ROOT)
        return module.removeprefix(ROOT)

    return {module: shown(module) for module in {change.module for change in trace.changes}}


def _kept(trace: Trace, parts: Sequence[Part], names: Mapping[str, str], last: int) -> dict[str, int]:
    """Activations that are there when the last microbatch's backward pass begins, by layer."""
    start, end = trace.marks[last][1], trace.marks[last + 1][1]
    blocks = [block.removeprefix(ROOT) for block in trace.blocks]
    found = dict.fromkeys([*blocks, ""], 0)
    for change in trace.changes[start:end]:
        if parts[change.serial] == "activations":
            name = names[trace.entries[change.serial].module]
            found[name if name in found else ""] += change.delta
    return found


def _held(trace: Trace) -> list[int]:
    """Bytes of the caching allocator's segments in use after each change."""
    allocator = CachingAllocator()
    blocks: dict[int, tuple[Block, bool]] = {}
    held = []
    for serial, size in _sizes(trace.changes):
        if serial in blocks:
            allocator.free(*blocks.pop(serial))
        if size > 0:
            blocks[serial] = (allocator.allocate(size), is_small(size))
        held.append(allocator.held)
    return held


def _sizes(changes: Sequence[Change]) -> Iterator[tuple[int, int]]:
    """Each change as a storage and its bytes after it."""
    sizes: dict[int, int] = {}
    for change in changes:
        sizes[change.serial] = sizes.get(change.serial, 0) + change.delta
        yield change.serial, sizes[change.serial]
