"""One step under the torch profiler: what it computes is what it computes without.

Its memory is what the allocator saw: every block from its allocation to its end, with its part and its owner.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.profile.prediction import PARTS, Part, Phase
from tuner.runtime import phase, torch_private
from tuner.runtime.parts import local
from tuner.train.step import TrainState

_COLLECTIVES = ("gloo:", "ncclDevKernel", "ncclKernel")
"""How the ranges of collectives at work begin: gloo's on a CPU, NCCL's kernels on CUDA."""


class StepRecorder:
    """Records what training does between :meth:`start` and :meth:`stop`: its parts in time, its blocks of memory.

    With ``modules`` the forward of each module is a range of its own; of compiled layers that of the layer.
    ``snapshot`` is where the CUDA allocator's history goes, with the line of code of each allocation. A trace has
    ``lines`` of Python, and with ``cuda_sync`` what streams wait for.
    """

    def __init__(
        self, train_state: TrainState, memory: bool = True, modules: bool = False, snapshot: Path | None = None,
        *, lines: bool = False, cuda_sync: bool = False,
    ) -> None:  # fmt: skip
        self._train_state, self._memory, self._modules = train_state, memory, modules
        self._device = train_state.step_config.device
        self._snapshot = snapshot if memory and self._device.type == "cuda" else None
        self._stack, self._part = ExitStack(), ExitStack()
        self._before: list[Owned] = []
        self._gradients: list[Owned] = []
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports every start and stop on stderr
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])
        config = torch_private.ProfilerConfig(enable_cuda_sync_events=True) if cuda_sync else None
        self._profile = profile(activities=kinds, profile_memory=memory, with_stack=lines, experimental_config=config)

    def start(self) -> None:
        """From here on; the wait for data comes first."""
        train_state = self._train_state
        self._before = resident(train_state) if self._memory else []
        self._synchronize()
        if self._modules:
            self._stack.enter_context(_module_ranges(train_state.root))
        if self._snapshot is not None:
            torch_private.record_memory_history("all", context="alloc", stacks="python", device=self._device)
            self._stack.callback(torch_private.record_memory_history, None)
        self._stack.enter_context(phase.observed(self._mark))
        self._profile.start()
        self._mark("data")

    def stop(self) -> None:
        """No further; it may be called after a step or a start that failed, and leaves everything as it was."""
        try:
            self._part.close()
            self._synchronize()
            self._profile.stop()
            if self._snapshot is not None:
                torch_private.dump_snapshot(str(self._snapshot))
        finally:
            self._stack.close()

    def __enter__(self) -> StepRecorder:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def memory(self, failed: bool = False) -> MemoryRecord:
        """The blocks of memory of the device; of a step that ``failed``, until it did."""
        return memory_record(self._profile, self._device.type, self._before, self._gradients, failed)

    def communication_s(self) -> float:
        """Seconds in which data was on its way between processes, also where other work hides it."""
        at_work = (event.time_range for event in self._profile.events() if event.name.startswith(_COLLECTIVES))
        spans = sorted((span.start, span.end) for span in at_work)
        total = until = 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total / 1e6

    def write_trace(self, path: Path) -> None:
        """Write the trace as Chrome's tracing and Perfetto read it; ``path`` ends in `.json` or `.json.gz`."""
        self._profile.export_chrome_trace(str(path))

    def _mark(self, part: str) -> None:
        """A part of the step begins as a range in the trace, and the one before it ends."""
        if part == "optimizer" and self._memory:
            self._gradients = gradients(self._train_state)
        self._part.close()
        self._part.enter_context(record_function(PHASE + part))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _module_ranges(root: CausalLM) -> Iterator[None]:
    """Within, every module's forward is a range of its own; hooks inside compiled layers would compile them again."""
    running: list[record_function] = []

    def entering(name: str, module: nn.Module, inputs: object) -> None:
        running.append(record_function(MODULE + name))
        running[-1].__enter__()

    def leaving(module: nn.Module, inputs: object, output: object) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        compiled = decoder_blocks(root.model) if root.parts.padding is not None else []
        inside = {module for block in compiled for module in block.modules()} - set(compiled)
        for name, module in root.model.named_modules():
            if name and module not in inside:
                stack.callback(module.register_forward_pre_hook(partial(entering, name)).remove)
                stack.callback(module.register_forward_hook(leaving, always_call=True).remove)
        yield


_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass
class AllocatedBlock:
    """One allocation: its bytes, what for, by which module or for which parameter, and when.

    ``made`` and ``freed`` count changes of the record: `made` is -1 for what was there before, and ``freed`` is None
    for what outlives it.
    """

    size: int
    part: Part
    owner: str
    made: int
    freed: int | None = None


@dataclass(frozen=True)
class Holding:
    """Bytes of one part that a module or parameter holds; an empty owner is what lies outside of all modules."""

    owner: str
    part: Part
    bytes: int


@dataclass(frozen=True)
class RecordedChange:
    """One step of the record: when, in seconds from its start, in which phase, and the innermost module at work."""

    seconds: float
    phase: Phase
    module: str


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of one process on its device over a recorded stretch of work, in the order in which it changed."""

    blocks: Sequence[AllocatedBlock]
    changes: Sequence[RecordedChange]

    @cached_property
    def _levels(self) -> npt.NDArray[np.int64]:
        """Bytes of each part, before all changes and after each: ``[1 + changes, parts]``."""
        deltas = np.zeros((len(self.changes) + 1, len(PARTS)), np.int64)
        for block in self.blocks:
            part = PARTS.index(block.part)
            deltas[block.made + 1, part] += block.size
            if block.freed is not None:
                deltas[block.freed + 1, part] -= block.size
        return deltas.cumsum(axis=0)

    def totals(self) -> list[int]:
        """Bytes alive before all changes, then after each."""
        totals: list[int] = self._levels.sum(axis=1).tolist()
        return totals

    def peak_at(self) -> int:
        """The first change after which most was alive; -1 is before all of them."""
        totals = self.totals()
        return totals.index(max(totals)) - 1

    def crossing(self, limit: int) -> int | None:
        """The first change after which more than so many bytes were alive."""
        return next((at - 1 for at, total in enumerate(self.totals()) if total > limit), None)

    def parts(self, at: int) -> dict[Part, int]:
        """Bytes of each part after change ``at``; they add up to the total."""
        return dict(zip(PARTS, self._levels[at + 1].tolist(), strict=True))

    def owners(self, at: int) -> list[Holding]:
        """Who held what after change ``at``, the largest first."""
        sizes: Counter[tuple[str, Part]] = Counter()
        for block in self.blocks:
            if block.made <= at and (block.freed is None or block.freed > at):
                sizes[block.owner, block.part] += block.size
        return [Holding(owner, part, size) for (owner, part), size in sizes.most_common()]

    def phase_peaks(self) -> dict[Phase, int]:
        """The largest total in each phase, over all its turns, with what it began with."""
        found: dict[Phase, int] = {}
        before, *after = self.totals()
        for change, total in zip(self.changes, after, strict=True):
            found[change.phase] = max(found.get(change.phase, 0), before, total)
            before = total
        return found

    def turns(self) -> list[tuple[Phase, float]]:
        """The phases in order, each with the second in which it took or gave memory first."""
        turns = groupby(self.changes, key=lambda change: change.phase)
        return [(phase, round(next(own).seconds, 6)) for phase, own in turns]

    def timeline(self, points: int = 400) -> tuple[list[float], dict[Part, list[int]]]:
        """Seconds of about so many moments, the fullest of their stretches, and bytes of each part that is there."""
        totals = self.totals()
        bounds = sorted({round(i * len(totals) / points) for i in range(points + 1)})
        kept = {0, len(totals) - 1}
        kept |= {max(range(a, b), key=totals.__getitem__) for a, b in pairwise(bounds)}
        times = [0.0, *(change.seconds for change in self.changes)]
        moments = sorted(kept)
        series = dict(zip(PARTS, self._levels[moments].T.tolist(), strict=True))
        return [round(times[at], 6) for at in moments], {part: sizes for part, sizes in series.items() if any(sizes)}


def alike(holdings: Iterable[Holding]) -> list[tuple[str, Part, int]]:
    """Owner, part and bytes, with owners that differ in the number of their layer taken together, largest first."""
    sizes: Counter[tuple[str, Part]] = Counter()
    counts: Counter[tuple[str, Part]] = Counter()
    for holding in holdings:
        name = _NUMBER.sub(".*", holding.owner, count=1) or "outside of modules"
        sizes[name, holding.part] += holding.bytes
        counts[name, holding.part] += 1
    found = []
    for (name, part), size in sizes.most_common():
        count = counts[name, part]
        found.append((f"{name} ({count} of them)" if "*" in name and count > 1 else name, part, size))
    return found


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
        self, before: Sequence[Owned], grads: Sequence[Owned], marks: list[tuple[int, str]],
        events: list[_AllocatorEvent],
    ) -> None:
        self._grads, self._marks, self._events = grads, marks, events
        self._blocks = [AllocatedBlock(owned.size, owned.part, owned.owner, -1) for owned in before]
        self._living = {owned.address: block for owned, block in zip(before, self._blocks, strict=True)}
        self._made: list[tuple[AllocatedBlock, _AllocatorEvent]] = []
        self._changes: list[RecordedChange] = []

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
                self._changes.append(RecordedChange((item.time - start) / 1e9, phase, item.context.module))
        if updates:
            self._assign_gradients()
        self._assign_activations()
        return MemoryRecord(self._blocks, self._changes)

    def _enter(self, item: _AllocatorEvent) -> bool:
        if item.size > 0:
            block = AllocatedBlock(item.size, item.context.part or "other", item.context.module, len(self._changes))
            self._made.append((block, item))
            self._blocks.append(block)
            self._living[item.address] = block
            return True
        if (ended := self._living.pop(item.address, None)) is not None:
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
