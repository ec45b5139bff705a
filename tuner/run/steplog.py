"""Steps whose numbers are still on the device, and their lines once they are known."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.run.diagnose import TakenStep
from tuner.run.meter import Meter
from tuner.run.progress import Progress, finite
from tuner.rundir.records import Records
from tuner.train.step import StepResult, StepScalars


@dataclass(frozen=True)
class StepEntry:
    """One step as the host knows it: ``epoch`` and ``tokens`` count from the run's start, its own included."""

    taken: TakenStep
    epoch: float
    tokens: int
    lr: float
    data_s: float
    scalars: StepScalars

    @property
    def step(self) -> int:
        """The step's number, from 1."""
        return self.taken.index + 1


@dataclass
class StepLog:
    """Turns steps into lines of metrics.jsonl, in order.

    A step's numbers are read at once where that is free, and one step late on a CUDA device, which by then has the
    next step queued and never runs dry.
    """

    meter: Meter
    metrics: Records
    progress: Progress
    halt: Callable[[TakenStep, StepResult], Exception]
    """Makes the error of a step after which the run must end. Collective."""
    on_line: Callable[[Mapping[str, Any]], None] = lambda line: None
    """Called with each line, in order."""

    def __post_init__(self) -> None:
        self._unread: deque[StepEntry] = deque()

    def add(self, entry: StepEntry) -> None:
        """A step was taken; lines of steps before it, or its own, may become known."""
        self._unread.append(entry)
        while self._unread and (len(self._unread) > 1 or self._unread[0].scalars.at_hand):
            self._read()

    def settle(self) -> None:
        """Read every step: before an evaluation, a save, and the end."""
        while self._unread:
            self._read()

    def _read(self) -> None:
        entry = self._unread.popleft()
        result = entry.scalars.read()
        if result.halted:
            self._unread.clear()
            self.progress.step = entry.taken.index
            raise self.halt(entry.taken, result)
        if math.isfinite(result.loss):
            self.progress.loss = result.loss
        line = self.meter.step_line(_facts(entry, result), entry.taken.batches, entry.data_s)
        self.metrics.add(line)
        self.on_line(line)


def _facts(entry: StepEntry, result: StepResult) -> dict[str, Any]:
    """The part of a line that the recipe determines."""
    facts = {
        "kind": "train",
        "step": entry.step,
        "epoch": round(entry.epoch, 6),
        "tokens": entry.tokens,
        "loss": finite(result.loss),
        "lr": entry.lr,
        "grad_norm": finite(result.grad_norm),
        **{name: finite(value) for name, value in result.figures.items()},
    }
    return facts | {"skipped": True} if result.skipped else facts
