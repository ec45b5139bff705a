"""From the profiler's events to blocks of memory.

The allocators themselves report to the profiler, scratch space inside of operations included; nothing that a step
computes passes through here. What was there before the recording is known by its owners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile

from tuner.parallel.fsdp import local
from tuner.profile.blocks import Block, Change, MemoryRecord
from tuner.profile.prediction import Part, Phase
from tuner.runtime import torch_private
from tuner.train.step import TrainState

PHASE, MODULE = "tuner.", "tuner.module "
"""Before the names of the ranges that a recorded step leaves in a trace: parts of the step, and modules at work."""
_GATHERED, _REDUCED = "FSDP::all_gather", "FSDP::post_backward"
_PHASES: dict[str, Phase] = {"data": "forward", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Owned:
    """A block whose owner is known: at this address, so large."""

    address: int
    size: int
    part: Part
    owner: str


@dataclass(frozen=True)
class _Context:
    """Where in the program something was: the innermost module, what FSDP2 did, and until when a module ran again."""

    module: str = ""
    part: Part | None = None
    until: int | None = None


@dataclass(frozen=True)
class _AllocatorEvent:
    """What an allocator reported: bytes taken, or given back where negative."""

    time: int
    address: int
    size: int
    context: _Context


def resident(train_state: TrainState) -> list[Owned]:
    """The blocks that are there between two steps: weights, and state of optimizer and guard, each once."""
    found: dict[int, Owned] = {}

    def add(tensor: torch.Tensor, part: Part, owner: str) -> None:
        held = local(tensor)
        storage = held.untyped_storage()
        if held.device == train_state.step_config.device and storage.nbytes():
            found.setdefault(storage.data_ptr(), Owned(storage.data_ptr(), storage.nbytes(), part, owner))

    teacher = train_state.method.teacher
    for model in (train_state.root.model, *(() if teacher is None else (teacher.model,))):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            add(tensor, "parameters", name)
    for name, tensor in train_state.optimizer.state_tensors().items():
        add(tensor, "optimizer", name.split("/", 2)[2])
    for name, tensor in train_state.tensors().items():
        add(tensor, "optimizer", name.partition("/")[2])
    for tensor in (*train_state.optimizer.local_tensors(), *train_state.guard.tensors):
        add(tensor, "optimizer", "")
    return list(found.values())


def gradients(train_state: TrainState) -> list[Owned]:
    """The gradients that are there."""
    storages = [(name, local(tensor).untyped_storage()) for name, tensor in train_state.gradient_tensors()]
    return [Owned(s.data_ptr(), s.nbytes(), "gradients", name) for name, s in storages]


def memory_record(
    done: profile, device: str, before: Sequence[Owned], grads: Sequence[Owned], failed: bool = False
) -> MemoryRecord:
    """The blocks of one kind of device from a profile that is done.

    ``before`` was there when it began, ``grads`` when the optimizer's turn came. With ``failed`` it ends where memory
    was taken for the last time: after that, the step that failed only let go.
    """
    results = done.profiler.kineto_results if done.profiler is not None else None
    events = [] if results is None else list(_walk(results.experimental_event_tree()))
    marks = sorted((event.start_time_ns, event.name[len(PHASE) :]) for event, _ in events if _is_phase(event))
    allocated = sorted(_allocator_events(events, device), key=lambda item: item.time)
    while failed and allocated and allocated[-1].size < 0:
        allocated.pop()
    return _Replay(before, grads, marks, allocated).record()


class _Replay:
    """Goes through what the allocators reported, in order of time."""

    def __init__(
        self,
        before: Sequence[Owned],
        grads: Sequence[Owned],
        marks: list[tuple[int, str]],
        events: list[_AllocatorEvent],
    ) -> None:
        self._grads, self._marks, self._events = grads, marks, events
        self._blocks = [Block(owned.size, owned.part, owned.owner, -1) for owned in before]
        self._living = {owned.address: block for owned, block in zip(before, self._blocks, strict=True)}
        self._made: list[tuple[Block, _AllocatorEvent]] = []
        self._changes: list[Change] = []

    def record(self) -> MemoryRecord:
        """The blocks, each with its part."""
        times = [time for time, _ in self._marks]
        start = times[0] if times else 0
        updates = [time for time, mark in self._marks if mark == "optimizer"]
        for item in self._events:
            if updates and item.time >= updates[0]:
                updates.clear()
                self._assign_gradients()
            before = bisect_right(times, item.time) - 1
            phase = _PHASES[self._marks[max(0, before)][1]] if times else "forward"
            if self._enter(item):
                self._changes.append(Change((item.time - start) / 1e9, phase, item.context.module))
        if updates:
            self._assign_gradients()
        self._assign_activations()
        return MemoryRecord(self._blocks, self._changes)

    def _enter(self, item: _AllocatorEvent) -> bool:
        if item.size > 0:
            block = Block(item.size, item.context.part or "other", item.context.module, len(self._changes))
            self._made.append((block, item))
            self._blocks.append(block)
            self._living[item.address] = block
            return True
        ended = self._living.pop(item.address, None)
        if ended is not None:
            ended.freed = len(self._changes)
        return ended is not None  # else made before the recording, by nobody that is known

    def _assign_gradients(self) -> None:
        for owned in self._grads:
            block = self._living.get(owned.address)
            if block is not None and block.made >= 0:
                block.part, block.owner = "gradients", owned.owner

    def _assign_activations(self) -> None:
        """What a forward pass leaves for the backward pass; so does one that is run again within it."""
        by_module = any(item.context.module for _, item in self._made)
        start = self._marks[0][0] if self._marks else 0
        for block, item in self._made:
            if block.part != "other":
                continue
            made = self._changes[block.made]
            ended = None if block.freed is None else self._changes[block.freed]
            if made.phase == "forward":
                kept = ended is None or ended.phase != "forward"
            else:
                until = item.context.until
                kept = until is not None and (ended is None or ended.seconds * 1e9 + start > until)
            if by_module and made.phase == "forward" and not item.context.module:
                block.part = "loss"  # what comes after the last module: logits, and what is made of them
            elif kept:
                block.part = "activations"


def _walk(roots: Iterable[Any]) -> Iterator[tuple[Any, _Context]]:
    """Every event with its context. The backward pass of an operation belongs to the module of its forward."""
    modules: dict[int, str] = {}
    waiting = [(event, _Context()) for event in sorted(roots, key=lambda event: -event.start_time_ns)]
    while waiting:
        event, context = waiting.pop()
        if event.tag == torch_private.EventType.TorchOp:
            number, scope = event.extra_fields.sequence_number, event.extra_fields.scope
            if event.name.startswith(MODULE):
                again = context.until if context.until is not None else event.end_time_ns
                context = _Context(event.name[len(MODULE) :], context.part, again)
            elif event.name.startswith(_GATHERED):
                context = _Context(context.module, "gathered", context.until)
            elif event.name.startswith(_REDUCED):
                context = _Context(context.module, "reduced", context.until)
            elif scope == torch_private.RecordScope.BACKWARD_FUNCTION:
                context = _Context(modules.get(number, context.module), context.part, context.until)
            elif number >= 0:
                modules[number] = context.module
        yield event, context
        waiting.extend((child, context) for child in reversed(event.children))


def _is_phase(event: Any) -> bool:
    is_ours = event.name.startswith(PHASE) and not event.name.startswith(MODULE)
    return bool(event.tag == torch_private.EventType.TorchOp and is_ours)


def _allocator_events(events: Iterable[tuple[Any, _Context]], device: str) -> Iterator[_AllocatorEvent]:
    for event, context in events:
        if event.tag == torch_private.EventType.Allocation and event.extra_fields.device.type == device:
            fields = event.extra_fields
            yield _AllocatorEvent(event.start_time_ns, int(fields.ptr or 0), int(fields.alloc_size), context)
