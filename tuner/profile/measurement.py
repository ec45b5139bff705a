"""What a few measured steps cost, as plain values: memory by part, phase and module, time by part, rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tuner.errors import counted
from tuner.profile.blocks import Holding
from tuner.profile.oom import OomReport
from tuner.profile.prediction import Part, Phase, Verdict
from tuner.profile.words import largest_first
from tuner.runtime.files import gib

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
            "step_s": step_s,
            "tok_per_s": self.tokens_per_step / step_s,
            "trained_per_s": self.trained_per_step / step_s,
            "data_wait": self.times["data"] / step_s,
            "communication": self.communication_s / step_s,
            "estimate_s": step_s * self.total_steps,
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
