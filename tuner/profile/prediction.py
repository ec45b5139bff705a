"""What a prediction says: bytes by part over a step, whether they fit, and how long a run takes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tuner.profile.devices import is_verified
from tuner.profile.traffic import Traffic

Part = Literal[
    "parameters", "gradients", "optimizer", "gathered", "reduced", "activations", "loss", "batch", "evaluation",
    "staging", "constants", "rounding", "other",
]  # fmt: skip
"""What bytes of a device are for.

``gathered`` are parameters made whole for one module and ``reduced`` the gradients on their way to their shards;
``loss`` is the output layer's logits and what is made of them, ``staging`` the copies of a checkpoint on its way to the
disk; ``constants`` are a context and communicators, ``rounding`` what an allocator holds beyond what was asked of it;
``other`` is what lives within an operation, such as the gradients of activations.
"""
PARTS: tuple[Part, ...] = get_args(Part)
Phase = Literal["build", "forward", "backward", "optimizer", "evaluation", "saving", "resuming"]
STEP: tuple[Phase, ...] = ("forward", "backward", "optimizer")
UNCOUNTED: tuple[Part, ...] = ("constants", "staging", "rounding")
"""Parts that are no tensors of a step."""
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class MemoryMoment:
    """The fullest moment of one module's turn in one phase: bytes by part, all parts named.

    ``module`` is the dotted name of the innermost module at work, as transformers names it; empty outside of all.
    """

    phase: Phase
    module: str
    parts: Mapping[Part, int]

    @property
    def total(self) -> int:
        """All bytes at this moment."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryTimeline:
    """The bytes of one process on its device, as they come and go over a run's phases.

    ``moments`` lie in the order of execution; they are those of one microbatch, the last of a step, where all others
    are alike.
    """

    moments: tuple[MemoryMoment, ...]
    layers: Mapping[str, int]
    """Activations that each module keeps from its forward to its backward pass, by name; ``""`` is what lies outside
    of all decoder layers."""
    host: Mapping[Part, int] = field(default_factory=dict)
    """Bytes in the host's memory at its fullest moment, where the device has a memory of its own."""

    @property
    def peak(self) -> MemoryMoment:
        """The fullest moment of all; the first of equal ones."""
        return max(self.moments, key=lambda moment: moment.total)

    def counted_peak(self) -> dict[Part, int]:
        """The fullest moment of a step, of the parts that an allocator counts in it: tensors."""
        counted: list[dict[Part, int]] = [
            {part: 0 if part in UNCOUNTED else size for part, size in moment.parts.items()}
            for moment in self.moments
            if moment.phase in STEP
        ]
        return max(counted, key=lambda parts: sum(parts.values()), default={})

    def peak_of(self, phase: Phase) -> MemoryMoment | None:
        """The fullest moment of a phase; None where the run has none."""
        moments = [moment for moment in self.moments if moment.phase == phase]
        return max(moments, key=lambda moment: moment.total) if moments else None


@dataclass(frozen=True)
class TimeEstimate:
    """A rough estimate of how long a run takes, from its FLOPs and rates of the device.

    ``flops`` are of one optimizer step over all processes, by part. ``basis`` says in words where the rates come from.
    """

    flops: Mapping[str, float]
    tokens_per_step: float
    step_s: float
    total_steps: int | None
    """None where the length of the run is not known: epochs of data that are not prepared."""
    basis: str
    traffic: Traffic = Traffic()
    """Of one process in a step, without its optimizer."""
    busy_s: float = 0.0
    """Of ``step_s``, what the device computes or waits for its host's memory, while the traffic runs."""

    @property
    def tok_per_s(self) -> float:
        """Tokens a second, over all processes."""
        return self.tokens_per_step / self.step_s

    @property
    def total_s(self) -> float | None:
        """Seconds of all steps, without evaluations and checkpoints; None where it is not known how many there are."""
        return None if self.total_steps is None else self.step_s * self.total_steps


@dataclass(frozen=True)
class Prediction:
    """What a recipe needs of each process's device, said before anything runs.

    ``error`` is the stated error of the peak as a share of it. A peak below the limit by less than that is ``tight``.
    """

    device: str
    device_kind: Literal["cuda", "cpu"]
    processes: int
    local_processes: int
    memory: MemoryTimeline
    limit_bytes: int
    error: float
    time: TimeEstimate
    assumptions: tuple[str, ...] = field(default=())
    """What the figures rest on, each in a sentence."""
    host_limit_bytes: int | None = None
    """What the process may take of the host's memory; None where that is the device's, or not known."""

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory at its fullest moment, without the process itself."""
        return sum(self.memory.host.values())

    @property
    def host_fits(self) -> bool:
        """Whether the host has room for what is kept there."""
        return self.host_limit_bytes is None or self.host_bytes <= self.host_limit_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes at the fullest moment."""
        return self.memory.peak.total

    @property
    def process_bytes(self) -> int:
        """Those of them that are no tensors: what the process itself takes of its device."""
        return self.memory.peak.parts["constants"]

    @property
    def tensor_bytes(self) -> int:
        """Those of them that are tensors, or an allocator's room for them."""
        return self.peak_bytes - self.process_bytes

    @property
    def margin_bytes(self) -> int:
        """What is left of the limit at the peak; negative where it does not fit."""
        return self.limit_bytes - self.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the peak is below the limit, and by more than the stated error; the host has room for its part."""
        if self.margin_bytes < 0 or not self.host_fits:
            return "does not fit"
        return "fits" if self.margin_bytes >= self.error * self.peak_bytes else "tight"

    @property
    def verified(self) -> bool:
        """Whether predictions for this device were ever held against measurements on one."""
        return is_verified(self.device_kind, self.device)

    @property
    def refuses(self) -> bool:
        """Whether a command may end because of it: it does not fit, and such predictions are verified."""
        return self.verified and self.verdict == "does not fit"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be known of its verdict, each in a sentence."""
        if self.verdict == "tight":
            return ("the peak is below the limit by less than the stated error",)
        if self.verdict == "does not fit" and not self.verified:
            return (
                f"it is predicted not to fit, but predictions for {self.device} are unverified: no command ends "
                "because of one, and training may go through",
            )
        return ()


NAMES: Mapping[Part, str] = {
    **{part: part for part in PARTS},
    "parameters": "weights",
    "gathered": "gathered weights",
    "reduced": "reduced gradients",
    "staging": "checkpoint copy",
    "constants": "process",
    "rounding": "allocator rounding",
    "other": "temporaries",
}
"""What people read for each part, in a terminal and on a page, predicted and measured.

All but ``constants`` are tensors, or room for them; those are what the process itself takes: Python with torch on a
CPU, the context and communicators on a CUDA device.
"""
TENSORS: tuple[Part, ...] = tuple(part for part in PARTS if part != "constants")
SMALL = 0.005
"""Parts below this share of the whole are left out of a sentence."""


@dataclass(frozen=True)
class Unit:
    """A unit of memory: its bytes, its name and the digits that its numbers have after the point."""

    bytes: int
    name: str
    digits: int

    def of(self, size: int) -> str:
        """A size in this unit: `0.25 GiB`, `257.0 MiB` or `340 bytes`."""
        return f"{self.number(size)} {self.name}"

    def number(self, size: int) -> str:
        """The same without the unit's name."""
        return f"{size / self.bytes:,.{self.digits}f}"


GIB, MIB, KIB, BYTE = Unit(1 << 30, "GiB", 2), Unit(1 << 20, "MiB", 1), Unit(1 << 10, "KiB", 1), Unit(1, "bytes", 0)


def unit_of(most: int) -> Unit:
    """The unit in which sizes up to ``most`` are shown side by side."""
    return next((unit for unit in (GIB, MIB, KIB) if most >= unit.bytes // 2), BYTE)


def largest_first(parts: Mapping[Part, int], of: Iterable[Part] = PARTS) -> str:
    """Those parts that count for something, each with its size, all in one unit."""
    sizes = {part: parts.get(part, 0) for part in of}
    whole = sum(sizes.values())
    unit = unit_of(whole)
    shown = sorted((part for part in sizes if sizes[part] > SMALL * whole), key=lambda part: -sizes[part])
    return ", ".join(f"{NAMES[part]} {unit.of(sizes[part])}" for part in shown)
