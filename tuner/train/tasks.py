"""What happens around and between steps: an ordered list of tasks, run alike on every rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

from tuner.config.recipe import Stage
from tuner.data.batches import StepBatches
from tuner.runtime import phase
from tuner.runtime.process import any_of, gloo_group
from tuner.train.step import StepScalars

Status = Literal["running", "finished", "stopped", "failed"]
EventStage = Stage | Literal["figures"]
"""When an event comes: at a stage that hooks know, or with a line of metrics.jsonl that is neither of a step nor of an
evaluation, which trackers get."""


class Request(Flag):
    """What a task asks of the whole run; what one rank asks, every rank does."""

    NONE = 0
    STOP = auto()
    """Save and end the launch after this step."""
    SAVE = auto()
    """Save after this step: the clock says so, which differs from rank to rank."""
    JOIN_SAVE = auto()
    """A save in the background is over: join it, and tell of it."""
    EVALUATE = auto()
    """Evaluate after this step."""
    EXPORT = auto()
    """Save and export after this step."""


@dataclass(frozen=True)
class TakenStep:
    """One step as the host knows it; its loss may still be on its way from the device."""

    index: int
    """From 0."""
    batches: StepBatches
    epoch: float
    """Epochs since the run's start, this step included."""
    tokens: int
    """Tokens since the run's start, this step included."""
    lr: float
    data_s: float
    """Seconds spent waiting for the batches."""
    scalars: StepScalars
    skipped_by_recipe: bool = False
    """Whether the recipe names the step as one to skip: nothing was computed of it."""

    @property
    def step(self) -> int:
        """The step's number, from 1."""
        return self.index + 1


@dataclass(frozen=True)
class Event:
    """Something that other tasks may want to know: a step's figures, an evaluation, a save."""

    stage: EventStage
    step: int
    tokens: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The line of metrics.jsonl of a step or an evaluation."""
    path: Path | None = None
    """The checkpoint of a save, the directory of an export."""
    status: Status = "running"


class Task:
    """Work around and between steps, on every rank in the order of the list; it never changes what a step computes.

    Every method does nothing unless a task defines it. Events that one returns are handed to all tasks, in order.
    """

    def start(self) -> Iterable[Event] | None:
        """Before the first step of a launch, which may be any of the run. Collective."""

    def around_step(self, number: int) -> AbstractContextManager[object]:
        """Entered before the wait for the data of step ``number``, left after its update; 0 is the mock batch."""
        return nullcontext()

    def step_taken(self, taken: TakenStep) -> Iterable[Event] | None:
        """After a step, before the ranks agree on what comes next. Not collective."""

    def request(self) -> Request:
        """What this rank asks for after a step. Not collective."""
        return Request.NONE

    def between_steps(self, agreed: Request) -> Iterable[Event] | None:
        """After a step, with what any task on any rank asked for. Collective."""

    def notify(self, event: Event) -> None:
        """Take note of what another task has done. Not collective."""

    def finish(self, finished: bool) -> Iterable[Event] | None:
        """After the last step of a launch, ``finished`` where it is the run's last one. Collective."""

    def close(self) -> Iterable[Event] | None:
        """Leave nothing half done after an error that is being raised; raise nothing."""


class Tasks:
    """The tasks of a launch."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self.stopping = False
        """Whether any task on any rank asked the launch to end."""

    def start(self) -> None:
        """Start every task. Collective."""
        self._each(lambda task: task.start())

    @contextmanager
    def around_step(self, number: int) -> Iterator[None]:
        """Around step ``number``, its wait for data included."""
        phase.enter(f"step {number}, data" if number else "mock batch")
        with ExitStack() as stack:
            for task in self._tasks:
                stack.enter_context(task.around_step(number))
            yield

    def after_step(self, taken: TakenStep) -> None:
        """Note the step, agree in one collective of the CPU's on what is asked for, and do it. The device runs on."""
        self._each(lambda task: task.step_taken(taken))
        asked = reduce(or_, (task.request() for task in self._tasks), Request.NONE)
        votes = any_of([request in asked for request in Request], gloo_group())
        agreed = reduce(or_, (request for request, wanted in zip(Request, votes, strict=True) if wanted), Request.NONE)
        self.stopping = self.stopping or Request.STOP in agreed
        self._each(lambda task: task.between_steps(agreed))

    def notify(self, event: Event) -> None:
        """Tell every task of an event."""
        for task in self._tasks:
            task.notify(event)

    def finish(self, finished: bool) -> None:
        """Finish every task. Collective."""
        self._each(lambda task: task.finish(finished))

    def close(self) -> None:
        """Have every task leave things in order after an error."""
        self._each(lambda task: task.close())

    def _each(self, work: Callable[[Task], Iterable[Event] | None]) -> None:
        """Have every task work in order, and tell all of them of its events."""
        for task in self._tasks:
            for event in work(task) or ():
                self.notify(event)
