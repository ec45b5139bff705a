"""Measure a few steps of the very setup that training runs: time by part, memory by part, and whether it fits."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tuner.checkpoint.agree import Ranks
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.prepared import PreparedData
from tuner.errors import MemoryLimitError, RecipeError
from tuner.profile.memory import MemoryPeak, StorageLog, gradient_tensors, model_tensors
from tuner.runtime.files import gib
from tuner.runtime.launch import Launch
from tuner.runtime.process import gloo_group
from tuner.train.setup import Assembly, Resolved, assemble
from tuner.train.step import optimizer_step

TIMES = ("data", "forward", "backward", "optimizer")
DEFAULT_STEPS = 3
OPTIMIZER_NAMES = {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon and AdamW"}


@dataclass(frozen=True)
class ProfileReport:
    """What the measured steps cost. Bytes are this process's on its device; seconds are means per optimizer step.

    `memory` is the peak by part; `resident_bytes` is the process's largest resident size (CPU only, code included);
    `estimate_s` is the whole run at the measured speed, without evaluations and checkpoints.
    """

    device: str
    optimizer: str
    steps: int
    total_steps: int
    tokens_per_step: float
    peak_bytes: int
    memory: Mapping[str, int]
    free_bytes: int
    resident_bytes: int | None
    times: Mapping[str, float]
    step_s: float
    tok_per_s: float
    estimate_s: float
    processes: int = 1
    """How many there were; memory is that of the one in which it is shortest, times are the first one's."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the free memory."""
        return self.peak_bytes <= self.free_bytes

    def text(self) -> str:
        """The verdict on one line."""
        divisor, unit = _unit(self.peak_bytes)
        names = {"optimizer": OPTIMIZER_NAMES.get(self.optimizer, "optimizer")}
        shown = {names.get(part, part): f"{size / divisor:.2f}" for part, size in self.memory.items()}
        parts = ", ".join(f"{name} {size}" for name, size in shown.items() if float(size))
        verdict = f"{'fits' if self.fits else 'does not fit'} in {gib(self.free_bytes)} free"
        of = f" in each of {self.processes} processes" if self.processes > 1 else ""
        peak = f"peak {self.peak_bytes / divisor:.2f} {unit}{of} ({parts})"
        return f"{peak} · {verdict} · {self.total_steps:,} steps, about {duration_text(self.estimate_s)}"

    def time_text(self) -> str:
        """Where a step's time goes, on one line."""
        shares = ", ".join(f"{part} {self.times[part] / self.step_s:.0%}" for part in TIMES)
        return f"{self.step_s:.3g} s a step ({shares}) · {self.tok_per_s:,.0f} tokens a second"


class _Clock:
    """Receives the marks of the training step and adds up the seconds of each part, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = 0.0
        self.part = "setup"
        self.seconds = dict.fromkeys(TIMES, 0.0)

    def mark(self, part: str) -> None:
        """`part` begins: the time since the last mark belongs to the part before it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self.part in self.seconds:
            self.seconds[self.part] += now - self._last
        self.part, self._last = part, now


def measure(
    resolved: Resolved,
    prepared: PreparedData,
    tokenizer: TextTokenizer,
    launch: Launch,
    steps: int = DEFAULT_STEPS,
    limit_bytes: int | None = None,
) -> ProfileReport:
    """Build what `train` builds, take one step with every allocation logged and `steps` timed ones, and report.

    The logged step is the one with the longest row. Nothing is saved and no run directory is touched. Memory is judged
    against `limit_bytes` for each process, by default what was free on the device before the model was built, on a CPU
    this process's share of it. Collective where there are several processes: each then has the same report. Raises
    MemoryLimitError where the device runs out of memory.
    """
    if steps < 1:
        raise RecipeError(f"--steps {steps}: at least one step is measured")
    free = limit_bytes if limit_bytes is not None else _free_bytes(resolved, launch)
    clock: _Clock | None = None
    with _out_of_memory(free, lambda: clock.part if clock else "setup"):
        assembly = assemble(resolved, prepared, tokenizer, launch)
        device = assembly.learner.numerics.device
        clock = _Clock(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        peak = _logged_step(assembly, clock)
        if assembly.resolved.recipe.train.compile is True:
            _timed_step(assembly, clock, 0)  # the compilation is no part of a step's time
        clock = _Clock(device)
        assembly.learner.marks = clock.mark
        tokens = [_timed_step(assembly, clock, index) for index in range(1, steps + 1)]
    if device.type == "cuda":
        peak = _with_allocator(peak, torch.cuda.max_memory_allocated(device))
    times = {part: seconds / steps for part, seconds in clock.seconds.items()}
    step_s = sum(times.values())
    table = assembly.timetable.plan
    report = ProfileReport(
        device=resolved.facts.name,
        optimizer=resolved.recipe.optimizer.kind,
        steps=steps,
        total_steps=table.total_steps,
        tokens_per_step=sum(tokens) / steps,
        peak_bytes=peak.peak,
        memory=peak.parts,
        free_bytes=free,
        resident_bytes=_resident_bytes() if device.type == "cpu" else None,
        times=times,
        step_s=step_s,
        tok_per_s=sum(tokens) / steps / step_s,
        estimate_s=step_s * table.total_steps,
        processes=launch.world_size,
    )
    return of_all(Ranks(gloo_group()).everywhere(lambda: report))


def of_all(reports: Sequence[ProfileReport]) -> ProfileReport:
    """One report for all processes, given theirs in order: the first one's, with the memory of where it is shortest."""
    shortest = max(reports, key=lambda report: report.peak_bytes / max(1, report.free_bytes))
    keys = ("peak_bytes", "memory", "free_bytes", "resident_bytes")
    return replace(reports[0], **{key: getattr(shortest, key) for key in keys})


def duration_text(seconds: float) -> str:
    """Seconds for people: `12 s`, `2.5 min`, `3.1 h`, `4.2 days`."""
    for size, unit in ((86400.0 * 2, "days"), (5400.0, "h"), (90.0, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _logged_step(assembly: Assembly, clock: _Clock) -> MemoryPeak:
    """One real step under the log; it is also the warm-up of the timed ones.

    The log sees single operations: layers that are compiled, which need no more, run as they are.
    """
    learner = assembly.learner
    log = StorageLog(learner.numerics.device, resized=assembly.launch.world_size > 1)
    log.assign(model_tensors(learner.root), "weights")
    learner.optimizer.allocate()
    learner.optimizer.set_step_count(0)
    log.assign(learner.optimizer.local_tensors(), "optimizer")

    def mark(part: str) -> None:
        clock.mark(part)
        log.phase = "activations" if part == "forward" else "other"
        if part == "optimizer":
            log.assign(gradient_tensors(learner.root), "gradients")

    learner.marks = mark
    with log, torch.compiler.set_stance("force_eager"):
        _step(assembly, _longest_step(assembly), 0)
    clock.mark("done")
    return log.peak()


def _timed_step(assembly: Assembly, clock: _Clock, index: int) -> int:
    clock.mark("data")
    tokens = _step(assembly, index, index)
    clock.mark("done")
    return tokens


def _step(assembly: Assembly, batch_index: int, index: int) -> int:
    """Take one optimizer step on the batches of `batch_index`; returns its tokens over all processes."""
    table = assembly.timetable
    batches = assembly.batches.step(batch_index)
    factor = table.schedule.factor(min(index + 1, table.plan.total_steps))
    optimizer_step(assembly.learner, index, batches, factor)
    return batches.tokens


def _free_bytes(resolved: Resolved, launch: Launch) -> int:
    """The processes of one machine share its memory on a CPU; each has a CUDA device of its own."""
    facts = resolved.facts
    return facts.free_bytes if facts.kind == "cuda" else facts.free_bytes // launch.local_world_size


def _longest_step(assembly: Assembly) -> int:
    """The step of the first epoch that trains on the longest row: where the activations are largest."""
    longest = int(assembly.prepared.train.tokens_per_row.argmax())
    steps = range(assembly.batches.steps_per_epoch)
    return next((i for i in steps if longest in assembly.batches.row_ids(i)), 0)


def _with_allocator(peak: MemoryPeak, allocated: int) -> MemoryPeak:
    """The allocator's peak on CUDA, scratch space of kernels included; what the log did not see is `other`."""
    extra = max(0, allocated - peak.peak)
    return MemoryPeak(peak.peak + extra, {**peak.parts, "other": peak.parts["other"] + extra})


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _out_of_memory(free: int, part: Callable[[], str]) -> Iterator[None]:
    """Turn the device's failed allocations into MemoryLimitError, naming the part of the step."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory and "can't allocate memory" not in text:
            raise
        raise MemoryLimitError(
            f"out of memory during {part()}: {gib(free)} were free before the model was built",
            hint="lower train.micro_batch_size or data.max_length, or train an adapter (--adapter.kind lora)",
        ) from error


def _unit(size: int) -> tuple[int, str]:
    exponent = min(3, int(math.log2(max(size, 1)) // 10 + (size >= 1 << 29 and size < 1 << 30)))
    return 1 << (10 * exponent), ("bytes", "KiB", "MiB", "GiB")[exponent]
