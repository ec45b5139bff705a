"""The task that measures each process's own time in the decoder layers, and names a slow one."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from tuner.config.recipe import HealthSection
from tuner.model.build import decoder_blocks
from tuner.parallel.layer_clock import LayerClock
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.runtime.process import Collective, gloo_group
from tuner.train.plan import cadence
from tuner.train.tasks import Event, Request, TakenStep, Task


@dataclass(frozen=True)
class RankTime:
    """One process's part of a step."""

    compute_s: float
    """Seconds in the forward passes of its decoder layers."""
    data_s: float
    """Seconds that it waited for its batches."""
    tokens: int

    @property
    def per_token(self) -> float:
        """Seconds of its own for each of its tokens: processes of unlike rows are compared by it."""
        return (self.compute_s + self.data_s) / max(1, self.tokens)


class RankTimesTask(Task):
    """Times steps of a cadence; other steps have neither a hook nor a collective of it.

    A rank is slow where it takes ``health.slow_rank`` times as long for a token as the median of the others, in two
    measurements in a row: it is named once, until it is as fast as they are.
    """

    def __init__(self, context: LaunchContext, section: HealthSection, log: LogTask) -> None:
        assembly, state = context.assembly, context.assembly.train_state
        self._console, self._log = context.console, log
        self._due = cadence(section.times_every, assembly.timetable.plan, assembly.prepared.train.tokens_per_row)
        self._factor = section.slow_rank
        self._clock = LayerClock(decoder_blocks(state.root.model), state.step_config.device)
        self._taken: TakenStep | None = None
        self._was_slow: frozenset[int] = frozenset()
        self._named: frozenset[int] = frozenset()

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """Time the step where it is due."""
        return self._clock.running() if number and self._due.due_at(number) else nullcontext()

    def step_taken(self, taken: TakenStep) -> None:
        """Keep a step that was timed."""
        self._taken = taken if self._due.due_at(taken.step) else None

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Gather the times of all processes, write them, and name who is slow."""
        taken = self._taken
        if taken is None:
            return
        yield from self._log.settle()
        with self._log.clock.pause():
            tokens = sum(len(batch.input_ids) for batch in taken.batches.micro)
            own = RankTime(self._clock.seconds(), taken.data_s, tokens)
            times = Collective(gloo_group()).on_all_ranks(lambda: own)
            line = _line(taken, times)
            self._log.metrics.add(line)
        yield Event("figures", taken.step, taken.tokens, line)
        self._name(taken.step, times)

    def _name(self, step: int, times: Sequence[RankTime]) -> None:
        """Warn of ranks that are slow for the second time in a row."""
        slow = slow_ranks(times, self._factor)
        for rank, ratio in slow.items():
            if rank in self._was_slow and rank not in self._named:
                one = times[rank]
                waits = f", {one.data_s:.3g} s of them waiting for its data" if one.data_s > one.compute_s else ""
                self._console.warn(
                    f"step {step}: rank {rank} is slow: {ratio:.1f} times as long for a token as the other ranks "
                    f"({one.compute_s + one.data_s:.3g} s{waits})"
                )
        self._named = frozenset(rank for rank in slow if rank in self._was_slow)
        self._was_slow = frozenset(slow)


def slow_ranks(times: Sequence[RankTime], factor: float) -> dict[int, float]:
    """The ranks that take ``factor`` times as long for a token as the median of the others, and how many times."""
    found = {}
    for rank, one in enumerate(times):
        others = [other.per_token for number, other in enumerate(times) if number != rank]
        usual = median(others) if others else 0.0
        if usual > 0 and one.per_token >= factor * usual:
            found[rank] = one.per_token / usual
    return found


def _line(taken: TakenStep, times: Sequence[RankTime]) -> dict[str, object]:
    """The line of metrics.jsonl."""
    slowest = max(range(len(times)), key=lambda rank: times[rank].per_token)
    return {
        "kind": "times",
        "step": taken.step,
        "tokens": taken.tokens,
        "compute_s": round(median(one.compute_s for one in times), 5),
        "compute_s_max": round(max(one.compute_s for one in times), 5),
        "wait_s_max": round(max(one.data_s for one in times), 5),
        "slowest_rank": slowest,
    }
