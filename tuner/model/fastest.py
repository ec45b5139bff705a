"""The fastest of several ways to compute the same: measured, and held to the results of the usual one first. One choice
is made here: the kernel that turns logits into loss and gradient on a GPU.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tuner.model.kernels import KERNELS
from tuner.model.output_layer import positions_of_chunk
from tuner.runtime.device import gpu_memory

GAIN = 0.97
"""A way takes over from the usual one where it takes at most this share of its time: less is within the noise."""
WARM_UP, ROUNDS = 2, 5


@dataclass(frozen=True)
class Candidate:
    """A way to compute: its name, what it gives for small inputs, and the work that is timed."""

    name: str
    results: Callable[[], Sequence[torch.Tensor]]
    work: Callable[[], object]


@dataclass(frozen=True)
class Fastest:
    """What was found: whose way is taken, what each took of those that are right, and why others are passed over."""

    name: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """In a few words, the fastest first."""
        times = sorted(self.milliseconds.items(), key=lambda one: one[1])
        found = [f"{name} {each:.3g} ms" for name, each in times]
        return ", ".join([*found, *(f"{name} passed over: {why}" for name, why in self.passed_over.items())])


def fastest(
    usual: Candidate, others: Sequence[Candidate], allowed: float, seconds: Callable[[Callable[[], object]], float]
) -> Fastest:
    """The fastest of some ways whose results are within ``allowed`` of the usual one's, relative by their norms.

    One that raises or is further off is passed over, however fast. ``seconds`` measures the work of one. What the usual
    way raises is raised.
    """
    wanted = [tensor.detach().float() for tensor in usual.results()]
    times, passed_over = {usual.name: seconds(usual.work) * 1e3}, dict[str, str]()
    for other in others:
        try:
            problem = problem_with(other.results(), wanted, allowed)
            if problem is None:
                times[other.name] = seconds(other.work) * 1e3
        except Exception as error:  # noqa: BLE001 - whatever a package that is not ours raises
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if problem is not None:
            passed_over[other.name] = problem
    best = min(times, key=lambda name: times[name])
    return Fastest(best if times[best] <= GAIN * times[usual.name] else usual.name, times, passed_over)


def problem_with(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], allowed: float) -> str | None:
    """How far results are from those that are ``wanted``, by their norms, in words; None within ``allowed``."""
    far = [float((a.detach().float() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True)]
    if all(each <= allowed for each in far):  # NaN is not
        return None
    worst = next(filter(math.isnan, far), max(far))
    return f"its results differ by {worst:.1%}"


def seconds_on(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What measures work on a device: the median of some rounds, each waited for, after some that are not counted."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def one(work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        wait()  # launches return before the device is through
        return time.perf_counter() - begun

    def measure(work: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            one(work)
        return statistics.median(one(work) for _ in range(ROUNDS))

    return measure


USUAL = "liger"
TRIED = 64
"""Positions whose loss and gradient are held to the usual kernel's."""
ALLOWED = 1e-2
"""How far they may be from these, relative: twice what rounding to bf16 makes of a gradient."""


def fastest_loss(vocabulary: int, device: torch.device) -> Fastest:
    """The fastest kernel for logits of so many tokens of a vocabulary in bf16; liger's unless another one is faster."""
    generator = torch.Generator(device).manual_seed(0)
    memory = gpu_memory(torch.empty(0, device=device))
    chunk = torch.empty(0, device=device, dtype=torch.bfloat16)
    count = max(TRIED, positions_of_chunk(vocabulary, chunk, memory))
    logits = torch.randn(count, vocabulary, generator=generator, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (count,), generator=generator, device=device)
    first = logits[:TRIED].clone()  # logits become their gradient, as soon as one kernel is timed

    def candidate(name: str) -> Candidate:
        def results() -> list[torch.Tensor]:
            few = first.clone()
            return [KERNELS[name](few, targets[:TRIED], True, None), few]

        return Candidate(name, results, lambda: KERNELS[name](logits, targets, True, None))

    return fastest(candidate(USUAL), [candidate("torch")], ALLOWED, seconds_on(device))
