"""The task that writes figures of each decoder layer, and names a layer that diverges."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tuner.config.numbers import Duration
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.runtime import phase
from tuner.train.internals import Divergence, Inside, InternalsWatch, added_up
from tuner.train.plan import cadence
from tuner.train.progress import finite
from tuner.train.tasks import Event, Request, TakenStep, Task

KIND = "internals"


class InternalsTask(Task):
    """Watches the steps of a cadence; other steps have neither a hook, a copy nor a collective of it.

    The layers' outputs, attention and units are those of the step's first microbatch, in a forward of its own after the
    update.
    """

    def __init__(self, context: LaunchContext, every: Sequence[Duration], log: LogTask) -> None:
        assembly = context.assembly
        self._state, self._console, self._log = assembly.train_state, context.console, log
        self._due = cadence(every, assembly.timetable.plan, assembly.prepared.train.tokens_per_row)
        self._watch = InternalsWatch(self._state)
        self._divergence = Divergence()
        self._taken: TakenStep | None = None
        self._sums: dict[str, torch.Tensor] = {}

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """Watch the step where it is due."""
        return self._watched() if number and self._due.due_at(number) else nullcontext()

    def step_taken(self, taken: TakenStep) -> None:
        """Keep a step that was watched."""
        self._taken = taken if self._due.due_at(taken.step) else None

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Observe a forward, add up what the processes have, write it, and name what diverges."""
        if (taken := self._taken) is None:
            return
        phase.enter(f"internals of step {taken.step}")
        yield from self._log.flush()
        with self._log.clock.pause() as pause:
            inside = Inside.of(self._state.root, taken.batches.micro[0], self._state.step_config, taken.step)
            of_step, of_forward = added_up([self._sums, inside.sums()])
            self._sums = {}
            found = self._watch.figures(of_step) | inside.figures(of_forward)
        figures = {name: finite(value) for name, value in found.items()}
        facts = {"kind": KIND, "step": taken.step, "tokens": taken.tokens}
        line = facts | figures | {"internals_s": round(pause.seconds, 3)}
        self._log.metrics.add(line)
        yield Event("figures", taken.step, taken.tokens, line)
        for growth in self._divergence.note(figures):
            self._console.warn(f"step {taken.step}: {growth}")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._watch.around_update():
            yield
        self._sums = self._watch.sums()
