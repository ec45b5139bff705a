"""The task that writes a line of metrics.jsonl for every step, the clock that times them, what looks at memory, and
columns that follow from the lines before: how often loss or gradient norm made a spike, and how far the tokens are by
Chinchilla's measure.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from tuner.rundir.records import Records
from tuner.runtime.device import DeviceMark, timeline_of
from tuner.runtime.memory import FreedMemory, peak_resident_bytes
from tuner.setup.specs import TaskSections
from tuner.train.progress import MfuMeter, Progress, finite
from tuner.train.step import StepResult
from tuner.train.tasks import Event, TakenStep, Task

SHORTEST_S = 1e-6


class HaltedError(Exception):
    """A step after which the run must end: more of its steps were not finite than the recipe allows.

    Raised alike on every rank.
    """

    def __init__(self, taken: TakenStep, result: StepResult) -> None:
        super().__init__(f"step {taken.step}")
        self.taken, self.result = taken, result


class Pause:
    """Work between two steps that is part of neither; the host's seconds are known once it is over."""

    seconds: float = 0.0


class StepClock:
    """Seconds from one step's end on the device to the next one's, without the pauses between them."""

    def __init__(self, device: torch.device) -> None:
        self._timeline = timeline_of(device)
        self._from, self._has_begun = self._timeline.mark(), False
        self._pauses: list[tuple[DeviceMark, DeviceMark]] = []

    def begin(self) -> None:
        """The first step of a launch begins now; other steps begin where the one before them ended."""
        if not self._has_begun:
            self._from, self._has_begun, self._pauses = self._timeline.mark(), True, []

    def lap(self, ended: DeviceMark) -> float:
        """Seconds of the step that ended then, more than none. The device has got there."""
        paused = sum(end.seconds_since(begun) for begun, end in self._pauses)
        seconds = ended.seconds_since(self._from) - paused
        self._from, self._pauses = ended, []
        return max(seconds, SHORTEST_S)  # a step that is left out queues nothing

    @contextmanager
    def pause(self) -> Iterator[Pause]:
        """Have the block count as part of no step. The steps before it have been read: the device has taken them."""
        pause, since, begun = Pause(), self._timeline.now(), self._timeline.mark()
        try:
            yield pause
        finally:
            self._pauses.append((begun, self._timeline.mark()))
            pause.seconds = self._timeline.now() - since


class LogTask(Task):
    """Writes a line for every step, in order: what the recipe determines first, what the clock says last.

    A step's numbers are read at once where that is free, and one step late on a CUDA device, which by then has the
    next step queued and never runs dry. Raises HaltedError where the guard ends the run.
    """

    def __init__(
        self, progress: Progress, metrics: Records, mfu: MfuMeter, device: torch.device,
        columns: Sequence["StepColumn"] = (),
    ) -> None:  # fmt: skip
        self.metrics, self.clock, self.columns = metrics, StepClock(device), list(columns)
        self._progress, self._mfu, self._device = progress, mfu, device
        self._unread: deque[TakenStep] = deque()
        self._elapsed_s = 0.0  # of the steps of this launch

    def start(self) -> None:
        """Ask the columns for the steps of earlier launches again."""
        lines = self.metrics.read() if self.columns else ()
        for line in (one for one in lines if one.get("kind") == "train"):
            self._further(line)

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """Start the clock with the first step."""
        if number:
            self.clock.begin()
        return nullcontext()

    def step_taken(self, taken: TakenStep) -> Iterator[Event]:
        """Lines of steps before this one, or its own, may become known."""
        self._unread.append(taken)
        while self._unread and (len(self._unread) > 1 or self._unread[0].scalars.reads_without_sync):
            yield self._read()

    def flush(self) -> Iterator[Event]:
        """Read every step: before an evaluation, a save, and the end."""
        while self._unread:
            yield self._read()

    def finish(self, finished: bool) -> Iterator[Event]:
        """Read what is left."""
        return self.flush()

    def _read(self) -> Event:
        taken = self._unread.popleft()
        result = taken.scalars.read()
        if result.halted:
            self._unread.clear()
            self._progress.step = taken.index
            raise HaltedError(taken, result)
        if math.isfinite(result.loss):
            self._progress.loss = result.loss
        line = _determined(taken, result)
        line |= self._further(line) | self._measured(taken)
        self.metrics.add(line)
        return Event("step", taken.step, taken.tokens, line)

    def _further(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for column in self.columns for name, value in column.of(line).items()}

    def _measured(self, taken: TakenStep) -> dict[str, Any]:
        """What the clock says of a step; ``mfu`` is left out where the model's arithmetic is not known."""
        step_s, batches = self.clock.lap(taken.scalars.ended), taken.batches
        mfu = None if taken.skipped_by_recipe else self._mfu.mfu(batches.micro, step_s)
        share = None if taken.skipped_by_recipe else self._mfu.attention_share(batches.micro)
        self._elapsed_s += step_s
        trained = 0 if taken.skipped_by_recipe else 1  # a speed is of what was computed
        return {
            "step_s": round(step_s, 4),
            "data_s": round(taken.data_s, 4),
            "tok_per_s": round(trained * batches.tokens / step_s, 1),
            "trained_per_s": round(trained * batches.trained_count / step_s, 1),
            "mem_gib": round(peak_memory_bytes(self._device) / 2**30, 3),
            "data_wait": round(min(1.0, taken.data_s / step_s), 4),
            **({} if mfu is None else {"mfu": round(mfu, 4)}),
            **({} if share is None else {"attention_share": round(share, 4)}),
            "elapsed_s": round(self._elapsed_s, 3),
            **reserved_memory(self._device),
        }


class MemoryTask(Task):
    """On a CPU, has the C library keep what steps free, or return it, by the most that they have held."""

    def __init__(self, freed: FreedMemory) -> None:
        self._freed = freed

    def start(self) -> None:
        """The model is built."""
        self._freed.before_first_step()

    def step_taken(self, taken: TakenStep) -> None:
        """Look at what this process has held so far."""
        self._freed.after_step()


def _determined(taken: TakenStep, result: StepResult) -> dict[str, Any]:
    """The part of a line that the recipe determines."""
    facts = {
        "kind": "train", "step": taken.step, "epoch": round(taken.epoch, 6), "tokens": taken.tokens,
        "loss": finite(result.loss), "lr": taken.lr, "grad_norm": finite(result.grad_norm),
        **{name: finite(value) for name, value in result.figures.items()},
    }
    if not result.skipped:
        return facts
    reason = {"reason": "steps_to_skip"} if taken.skipped_by_recipe else {}
    return facts | {"skipped": True} | reason | ({"overflow": True} if result.overflowed else {})


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated device memory, or of the process's resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def reserved_memory(device: torch.device) -> dict[str, float]:
    """What the allocator of a GPU holds at its fullest, tensors or not, as a line of metrics.jsonl has it."""
    if device.type != "cuda":
        return {}
    return {"mem_reserved_gib": round(torch.cuda.max_memory_reserved(device) / 2**30, 3)}


CHINCHILLA_TOKENS = 20
"""Tokens for each parameter (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556), of those without the input
embedding, as the rules of a ladder count them."""


class StepColumn(Protocol):
    """What is added to the line of each step: asked once for each of the run, in order, by a resumed launch again."""

    def of(self, line: Mapping[str, Any]) -> Mapping[str, float | None]:
        """The columns of a line of metrics.jsonl, by name."""


class SpikeScore:
    """The share of steps with a spike: a loss or gradient norm that is not finite, or more than ``sigmas`` standard
    deviations above the mean of the ``window`` steps before it; of all steps, and of the ``last`` ones."""

    def __init__(self, sigmas: float, window: int, last: int) -> None:
        self._sigmas = sigmas
        self._window = deque[tuple[float, float]](maxlen=window)
        self._last = deque[bool](maxlen=last)
        self._spikes = self._steps = 0

    def of(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Both shares, this step included; nothing of a step that the recipe leaves out."""
        if "reason" in line:
            return {}
        values = (line["loss"], line["grad_norm"])
        spike = None in values
        if not spike:
            if len(self._window) == self._window.maxlen:
                before = np.array(self._window)
                spike = bool((np.array(values) > before.mean(0) + self._sigmas * before.std(0, ddof=1)).any())
            self._window.append(values)
        self._last.append(spike)
        self._spikes, self._steps = self._spikes + spike, self._steps + 1
        shares = {"spike_score": self._spikes / self._steps, "spike_score_last": sum(self._last) / len(self._last)}
        return {name: round(share, 6) for name, share in shares.items()}


class Chinchilla:
    """Tokens so far, in multiples of what is compute-optimal for so many ``parameters``."""

    def __init__(self, parameters: int) -> None:
        self._optimal = CHINCHILLA_TOKENS * parameters

    def of(self, line: Mapping[str, Any]) -> dict[str, float]:
        """The multiple, the step's own tokens included."""
        return {"chinchilla": round(line["tokens"] / self._optimal, 6)}


def step_columns(sections: TaskSections) -> Iterator[StepColumn]:
    """Those of a recipe: spikes where they are asked for, Chinchilla's measure where a model begins at random."""
    logging = sections.logging
    if logging.spike_score is not None:
        yield SpikeScore(logging.spike_score, sections.spike_window, logging.spike_score_last)
    if sections.trained_from_nothing is not None:
        yield Chinchilla(sections.trained_from_nothing)
