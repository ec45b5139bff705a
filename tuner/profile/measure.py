"""Measure a few steps of the very setup that training runs: memory by part and module, time by part, and rates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tuner.data.batches import StepBatches
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MemoryLimitError, RecipeError, counted
from tuner.profile.devices import data_sheet_rate
from tuner.profile.prediction import Part, Phase, Verdict, largest_first
from tuner.profile.recorder import Holding, MemoryRecord, StepRecorder
from tuner.profile.watch import OomReport, clear_frames, less_of, replay_step, report_at, with_fix
from tuner.runtime import phase
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.runtime.memory import FreedMemory, peak_resident_bytes
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly, build
from tuner.setup.less_memory import memory_errors_as
from tuner.setup.resolve import Resolved
from tuner.setup.specs import step_sections
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
    sections = step_sections(resolved)
    room = f"out of memory while the model is built: {gib(free)} were free before"
    smaller = "take a smaller model" + (", or write adapter.kind: lora" if sections.adapter.kind == "none" else "")
    with memory_errors_as(lambda error: MemoryLimitError(room, hint=smaller)):
        assembly = build(resolved, prepared, tokenizer, rank_info)
    device = assembly.train_state.step_config.device
    longest = _longest_step(assembly)
    with memory_errors_as(partial(_examined, assembly, longest + 1)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if (freed := FreedMemory(free) if device.type == "cpu" else None) is not None:  # as in training
            freed.before_first_step()
        record = _recorded_step(assembly, longest, options.output)
        if freed is not None:
            freed.after_step()
        clock, batches = _timed_steps(assembly, options.steps)
        resident = peak_resident_bytes() if device.type == "cpu" else None
        communication_s, files = _traced_step(assembly, options)
    steps, meter, precision = options.steps, assembly.mfu, resolved.numerics.precision
    asked = [meter.operations(one.micro) for one in batches]
    found = Measurement(
        device=resolved.facts.name, precision=precision, optimizer=sections.optimizer.kind,
        processes=rank_info.world_size, steps=steps, total_steps=assembly.timetable.plan.total_steps,
        tokens_per_step=sum(one.tokens for one in batches) / steps,
        trained_per_step=sum(one.trained_count for one in batches) / steps, memory=_memory(record, device),
        free_bytes=free, resident_bytes=resident,
        times={part: seconds / steps for part, seconds in clock.seconds.items()}, communication_s=communication_s,
        flops=sum(one or 0.0 for one in asked) / steps if meter.flops.complete else None, peak_flops=meter.peak,
        datasheet_flops=data_sheet_rate(resolved.facts.name) if precision in {"bf16", "fp16"} else None, files=files,
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
    clock, taken = _Clock(assembly.train_state.step_config.device), []
    with phase.observed(clock.mark), Prefetcher(assembly.batches, 1 + steps) as rows:
        for index in range(1, 1 + steps):
            clock.mark("data")
            taken.append(rows.step(index))
            _take(assembly, taken[-1], index)
            clock.mark("")
    return clock, taken


def _traced_step(assembly: Assembly, options: MeasureOptions) -> tuple[float, Mapping[str, str]]:
    """Seconds of communication in one more step, and the files written, where any are wanted."""
    output = options.output
    if assembly.rank_info.world_size == 1 and output is None:
        return 0.0, {}
    batches = assembly.batches.step(options.steps + 1)
    with StepRecorder(assembly.train_state, memory=False) as recorder:
        _take(assembly, batches, options.steps + 1)
    if output is None:
        return recorder.communication_s(), {}
    trace = output / f"trace-rank{assembly.rank_info.rank}.json.gz"
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
    if (at := record.crossing(free)) is None:
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


def _examined(assembly: Assembly, number: int, error: BaseException) -> MemoryLimitError:
    """What a failed allocation of a step ends with: it says what held the memory."""
    message = str(error)
    clear_frames(error)
    if assembly.rank_info.world_size > 1:
        return MemoryLimitError(f"out of memory: {message.splitlines()[0]}", hint=less_of(assembly))
    report = replace(replay_step(assembly, number, message), where=LONGEST)
    return MemoryLimitError(report.line(), hint=report.hint())


TIMES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of a process on its device in the step with the longest row, as its allocator reported it."""

    peak_bytes: int
    parts: Mapping[Part, int]
    """At the peak; they add up to it."""
    phases: Mapping[Phase, int]
    """The peak of each phase."""
    largest: tuple[Holding, ...]
    """Who holds most at the peak."""
    seconds: Sequence[float]
    series: Mapping[Part, Sequence[int]]
    """Bytes of each part at moments of the step, at ``seconds`` from its start."""
    marks: Sequence[tuple[Phase, float]]
    """The phases in order, each with the second it begins at."""
    reserved_bytes: int | None = None
    """CUDA only: what the caching allocator took from the device, unused room in its blocks included."""


@dataclass(frozen=True)
class Measurement:
    """What the measured steps cost. Bytes are this process's on its device; seconds are means per optimizer step.

    ``free_bytes`` is what it is judged against. ``communication_s`` overlaps the parts of ``times``;
    ``flops`` are this process's a step, ``peak_flops`` what its device reaches in one large product.
    """

    device: str
    precision: str
    optimizer: str
    processes: int
    steps: int
    total_steps: int
    tokens_per_step: float
    trained_per_step: float
    memory: MeasuredMemory
    free_bytes: int
    resident_bytes: int | None
    """On a CPU the most that the whole process had in memory (RSS), its start included; None on CUDA."""
    times: Mapping[str, float]
    communication_s: float
    flops: float | None
    """None where the model's FLOPs are not known; there is no MFU then."""
    peak_flops: float | None
    """None under fp8: there is no MFU then."""
    datasheet_flops: float | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    shortage: OomReport | None = None
    """Where the peak is above ``free_bytes``: the moment at which it was passed."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.times.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the free memory."""
        return self.memory.peak_bytes <= self.free_bytes

    @property
    def verdict(self) -> Verdict:
        """The same in words."""
        return "fits" if self.fits else "does not fit"

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second over all processes, shares of the step, and how long the whole run takes at this speed."""
        step_s = self.step_s
        shown = {
            "step_s": step_s, "tok_per_s": self.tokens_per_step / step_s,
            "trained_per_s": self.trained_per_step / step_s, "data_wait": self.times["data"] / step_s,
            "communication": self.communication_s / step_s, "estimate_s": step_s * self.total_steps,
        }
        peaks = {"mfu": self.peak_flops, "mfu_of_datasheet": self.datasheet_flops}
        if self.flops is not None:
            shown |= {name: self.flops / step_s / peak for name, peak in peaks.items() if peak is not None}
        return shown

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, with what follows from it."""
        plain = asdict(self) | {"fits": self.fits} | self.rates
        plain["memory"]["largest"] = plain["memory"]["largest"][:50]
        return plain

    def text(self) -> str:
        """The verdict on one line."""
        memory = self.memory
        of = f" in each of {self.processes} processes" if self.processes > 1 else ""
        peak = f"peak {gib(memory.peak_bytes)} of tensors{of} ({largest_first(memory.parts)})"
        process = "" if self.resident_bytes is None else f" · process {gib(self.resident_bytes)} (RSS)"
        verdict = f"{self.verdict} in {gib(self.free_bytes)} free"
        length = duration_text(self.rates["estimate_s"])
        return f"{peak}{process} · {verdict} · {counted(self.total_steps, 'step')}, about {length}"

    def time_text(self) -> str:
        """Where a step's time goes, on one line."""
        rates = self.rates
        shares = [f"{part} {self.times[part] / self.step_s:.0%}" for part in TIMES]
        if self.processes > 1:
            shares.append(f"communication {rates['communication']:.0%}, overlapping")
        sheet = rates.get("mfu_of_datasheet")
        of_sheet = "" if sheet is None else f", {sheet:.1%} of the datasheet's"
        tokens = f"{rates['tok_per_s']:,.0f} tokens/s, {rates['trained_per_s']:,.0f} of them trained"
        peak = f"the {(self.peak_flops or 0.0) / 1e12:.3g} TFLOP/s of a large product"
        mfu = f" · MFU {rates['mfu']:.1%} of {peak}{of_sheet}" if "mfu" in rates else ""
        return f"{self.step_s:.3g} s/step ({', '.join(shares)}) · {tokens}{mfu}"


def of_all(found: Sequence[Measurement]) -> Measurement:
    """One for all processes, given theirs in order: the first one's, with the memory of where it is shortest."""
    shortest = max(found, key=lambda one: one.memory.peak_bytes / max(1, one.free_bytes))
    keys = ("memory", "free_bytes", "resident_bytes", "shortage")
    return replace(found[0], **{key: getattr(shortest, key) for key in keys})


def duration_text(seconds: float) -> str:
    """Seconds for people: `25 ms`, `12 s`, `2.5 min`, `3.1 h`, `4.2 days`."""
    for size, unit in ((86400.0 * 2, "days"), (5400.0, "h"), (90.0, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.1f} {unit}"
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
