"""Measure a few steps of the very setup that training runs: memory by part and module, time by part, and rates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tuner.data.batches import StepBatches
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MemoryLimitError, RecipeError, is_out_of_memory
from tuner.profile.blocks import MemoryRecord
from tuner.profile.devices import data_sheet_rate
from tuner.profile.measurement import TIMES, MeasuredMemory, Measurement, of_all
from tuner.profile.oom import OomReport, clear_frames, replay_step, report_at, with_fix
from tuner.profile.recorder import StepRecorder
from tuner.runtime import phase
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.runtime.memory import FreedMemory, peak_resident_bytes
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly, build
from tuner.setup.less_memory import less_memory
from tuner.setup.resolve import Resolved
from tuner.train.prefetcher import Prefetcher
from tuner.train.step import optimizer_step

LONGEST = "the step with the longest row"


@dataclass(frozen=True)
class MeasureOptions:
    """How many steps are timed, against what memory of each process is judged, and where files go, if anywhere.

    Without ``limit_bytes`` it is what was free on the device before the model was built, on a CPU this process's share.
    """

    steps: int
    limit_bytes: int | None = None
    output: Path | None = None
    dry_run: bool = False
    """Only plan it."""


class _Clock:
    """Receives the marks of the training step and adds up the seconds of each part, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = 0.0
        self._part = ""
        self.seconds = dict.fromkeys(TIMES, 0.0)

    def mark(self, part: str) -> None:
        """`part` begins: the time since the last mark belongs to the part before it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._part in self.seconds:
            self.seconds[self._part] += now - self._last
        self._part, self._last = part, now


def measure(
    resolved: Resolved, prepared: PreparedData, tokenizer: TextTokenizer, rank_info: RankInfo, options: MeasureOptions
) -> Measurement:
    """Build what `train` builds, record memory in one step, time others, trace one, and report.

    Memory is that of the step with the longest row. Nothing is saved, and no run directory is touched. Collective where
    there are several processes: each then has the same report. Raises MemoryLimitError, which says what held the memory
    and what would fit, where the device runs out of it.
    """
    if options.steps < 1:
        raise RecipeError(f"--measure {options.steps}: at least one step is measured")
    free = options.limit_bytes if options.limit_bytes is not None else _free_bytes(resolved, rank_info)
    with _memory_errors(free, resolved.recipe.adapter.kind != "none"):
        assembly = build(resolved, prepared, tokenizer, rank_info)
    device = assembly.train_state.step_config.device
    longest = _longest_step(assembly)
    with _examined(assembly, longest + 1):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        freed = FreedMemory(free) if device.type == "cpu" else None  # as in training
        if freed is not None:
            freed.before_first_step()
        record = _recorded_step(assembly, longest, options.output)
        if freed is not None:
            freed.after_step()
        clock, batches = _timed_steps(assembly, options.steps)
        resident = peak_resident_bytes() if device.type == "cpu" else None
        communication_s, files = _traced_step(assembly, options)
    steps, meter, precision = options.steps, assembly.mfu, str(resolved.recipe.train.precision)
    asked = [meter.operations(one.micro) for one in batches]
    found = Measurement(
        device=resolved.facts.name,
        precision=precision,
        optimizer=resolved.recipe.optimizer.kind,
        processes=rank_info.world_size,
        steps=steps,
        total_steps=assembly.timetable.plan.total_steps,
        tokens_per_step=sum(one.tokens for one in batches) / steps,
        trained_per_step=sum(one.trained_count for one in batches) / steps,
        memory=_memory(record, device),
        free_bytes=free,
        resident_bytes=resident,
        times={part: seconds / steps for part, seconds in clock.seconds.items()},
        communication_s=communication_s,
        flops=sum(one or 0.0 for one in asked) / steps if meter.flops.complete else None,
        peak_flops=meter.peak,
        datasheet_flops=data_sheet_rate(resolved.facts.name) if precision in {"bf16", "fp16"} else None,
        files=files,
        shortage=_oom_report(assembly, record, free),
    )
    return of_all(Collective(gloo_group()).on_all_ranks(lambda: found))


def _recorded_step(assembly: Assembly, longest: int, output: Path | None) -> MemoryRecord:
    """One real step under the recorder; it is also the warm-up of the timed ones. Compiled layers run compiled."""
    train_state = assembly.train_state
    train_state.optimizer.allocate()
    train_state.optimizer.set_step_count(0)
    snapshot = None if output is None else output / f"memory-rank{assembly.rank_info.rank}.pickle"
    if train_state.root.parts.padding is not None:
        _take(assembly, assembly.batches.step(longest), 0)  # what compiling takes is no part of a step
    with StepRecorder(train_state, modules=True, snapshot=snapshot) as recorder:
        _take(assembly, assembly.batches.step(longest), 0)
    return recorder.memory()


def _timed_steps(assembly: Assembly, steps: int) -> tuple[_Clock, list[StepBatches]]:
    """Steps as training takes them, batches made ready ahead included."""
    train_state = assembly.train_state
    first = 1
    clock = _Clock(train_state.step_config.device)
    taken = []
    with phase.observed(clock.mark), Prefetcher(assembly.batches, first + steps) as rows:
        for index in range(first, first + steps):
            clock.mark("data")
            taken.append(rows.step(index))
            _take(assembly, taken[-1], index)
            clock.mark("")
    return clock, taken


def _traced_step(assembly: Assembly, options: MeasureOptions) -> tuple[float, Mapping[str, str]]:
    """Seconds of communication in one more step, and the files written, where any are wanted."""
    rank, output = assembly.rank_info.rank, options.output
    if assembly.rank_info.world_size == 1 and output is None:
        return 0.0, {}
    index = options.steps + 1
    batches = assembly.batches.step(index)
    with StepRecorder(assembly.train_state, memory=False) as recorder:
        _take(assembly, batches, index)
    if output is None:
        return recorder.communication_s(), {}
    trace = output / f"trace-rank{rank}.json.gz"
    recorder.write_trace(trace)
    return recorder.communication_s(), {"trace": trace.name}


def _take(assembly: Assembly, batches: StepBatches, index: int) -> None:
    table = assembly.timetable
    optimizer_step(assembly.train_state, index, batches, table.schedule.factor(min(index + 1, table.plan.total_steps)))


def _memory(record: MemoryRecord, device: torch.device) -> MeasuredMemory:
    """On CUDA the allocator's peak over all steps; what the recorded one did not have is `other`."""
    at, (seconds, series) = record.peak_at(), record.timeline()
    peak, parts = max(record.totals()), record.parts(at)
    reserved = None
    if device.type == "cuda":
        extra = max(0, torch.cuda.max_memory_allocated(device) - peak)
        peak, parts = peak + extra, parts | {"other": parts["other"] + extra}
        reserved = torch.cuda.max_memory_reserved(device)
    owners, turns = tuple(record.owners(at)), record.turns()
    return MeasuredMemory(peak, parts, record.phase_peaks(), owners, seconds, series, turns, reserved)


def _oom_report(assembly: Assembly, record: MemoryRecord, free: int) -> OomReport | None:
    """The moment at which a step that ran held more than it is to hold, and, for a single process, what would fit."""
    at = record.crossing(free)
    if at is None:
        return None
    found = report_at(assembly, record, max(at, 0), f"{LONGEST}, judged against {gib(free)}")
    return found if assembly.rank_info.world_size > 1 else with_fix(assembly, found, free)


def _free_bytes(resolved: Resolved, rank_info: RankInfo) -> int:
    """The processes of one machine share its memory on a CPU; each has a CUDA device of its own."""
    facts = resolved.facts
    return facts.free_bytes if facts.kind == "cuda" else facts.free_bytes // rank_info.local_world_size


def _longest_step(assembly: Assembly) -> int:
    """The step of the first epoch that trains on the longest row: where the activations are largest."""
    longest = int(assembly.prepared.train.tokens_per_row.argmax())
    steps = range(assembly.batches.steps_per_epoch)
    return next((i for i in steps if longest in assembly.batches.row_ids(i)), 0)


@contextmanager
def _memory_errors(free: int, adapted: bool) -> Iterator[None]:
    """Say of a model that cannot even be built how much was free."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(
            f"out of memory while the model is built: {gib(free)} were free before",
            hint="take a smaller model" + ("" if adapted else ", or write adapter.kind: lora"),
        ) from error


@contextmanager
def _examined(assembly: Assembly, number: int) -> Iterator[None]:
    """Turn the device's failed allocations into a MemoryLimitError that says what held the memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
        clear_frames(error)
        if assembly.rank_info.world_size > 1:
            raise MemoryLimitError(
                f"out of memory: {message.splitlines()[0]}",
                hint=less_memory(assembly.resolved.recipe, assembly.rank_info.world_size),
            ) from None
        report = replace(replay_step(assembly, number, message), where=LONGEST)
        raise MemoryLimitError(report.line(), hint=report.hint()) from None
