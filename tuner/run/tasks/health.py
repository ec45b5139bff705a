"""The tasks that watch over the machines of a run: one checks devices, collectives and copies of the model, on a
cadence and before saves; one measures each process's own time in the decoder layers, and names a slow one.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

from tuner.checkpoint.manifest import step_name
from tuner.config.recipe import HealthSection
from tuner.errors import MachineError, TunerError, VerificationError, counted
from tuner.model.build import decoder_blocks
from tuner.parallel.health import Copy, KnownProducts, first_difference, sums_of, wrong_collective
from tuner.parallel.layer_clock import LayerClock
from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.runtime import phase
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import run_tensors
from tuner.train.plan import cadence
from tuner.train.tasks import Event, Request, TakenStep, Task


class HealthTask(Task):
    """Checks at the start of a launch, every so often, and before saves; an error ends the run before it saves.

    What is not trained is also compared with what it was when the launch began, on each process by itself.
    """

    def __init__(self, context: LaunchContext, section: HealthSection, log: LogTask) -> None:
        self._assembly, self._progress, self._console = context.assembly, context.progress, context.console
        self._log, self._run_dir = log, context.run.path
        self._checkpoints = context.run.checkpoints
        self._before_saves, prepared = section.before_saves, self._assembly.prepared
        self._due = cadence(section.every, self._assembly.timetable.plan, prepared.train.tokens_per_row)
        # Kept from before the first forward: a unit that is gathered shows other tensors.
        self._frozen = {
            name: parameter
            for name, parameter in self._assembly.train_state.root.model.named_parameters()
            if not parameter.requires_grad
        }
        self._frozen_sums: dict[str, int] = {}
        self._products: KnownProducts | None = None
        self._whole_at: int | None = None
        """The last step whose state was found whole."""

    def start(self) -> None:
        """Compute the known products for the first time, and check. Collective."""
        config = self._assembly.train_state.step_config
        self._products = KnownProducts(config.device, config.autocast)
        with self._log.clock.pause() as pause:
            n_tensors = self._check()
        processes = self._assembly.mesh.size
        copies = f", collectives and the copies of {counted(n_tensors, 'tensor')}" if processes > 1 else ""
        devices = f"{processes} devices" if processes > 1 else "the device"
        self._console.say("health", f"{devices}{copies} checked in {pause.seconds:.2f} s")

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Check where it is due."""
        progress = self._progress
        if not self._due.due_at(progress.step):
            return
        yield from self._log.flush()
        with self._log.clock.pause() as pause:
            self._check()
        facts = {"kind": "health", "step": progress.step, "tokens": progress.tokens}
        line = facts | {"check_s": round(pause.seconds, 3)}
        self._log.metrics.add(line)
        yield Event("figures", progress.step, progress.tokens, line)

    def before_save(self) -> None:
        """Check where the recipe wants that before a save. Collective; raises MachineError and VerificationError."""
        if self._before_saves and self._whole_at != self._progress.step:
            self._check()

    def _check(self) -> int:
        """Check everything; returns of how many tensors several processes have copies."""
        phase.enter(f"health check after step {self._progress.step}")
        ranks = Collective(gloo_group())
        self._check_devices(ranks)
        count = self._check_copies(ranks)
        self._whole_at = self._progress.step
        return count

    def _check_devices(self, ranks: Collective) -> None:
        products, device = self._products, self._assembly.train_state.step_config.device
        assert products is not None, "the launch has begun"
        computed, carried = products.problem(), wrong_collective(device, ranks)
        own = f"{socket.gethostname()}, {device}", computed or carried
        for rank, (where, problem) in enumerate(ranks.on_all_ranks(lambda: own)):
            if problem is not None:
                raise self._failed(MachineError, f"rank {rank} ({where}): {problem}")

    def _check_copies(self, ranks: Collective) -> int:
        named = self._frozen | run_tensors(self._assembly.train_state)
        held = [Copy.of(name, tensor, ranks.size) for name, tensor in named.items()]
        wanted = [copy for copy in held if copy.copies > 1 or copy.name in self._frozen]
        sums = sums_of(wanted)
        found = dict(zip((copy.name for copy in wanted), sums, strict=True))
        frozen = {name: found[name] for name in self._frozen}
        before = self._frozen_sums or frozen
        changed = [name for name, value in frozen.items() if before[name] != value]
        for rank, names in enumerate(ranks.on_all_ranks(lambda: changed)):
            if names:
                others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
                what = f"{names[0]}{others}, which nothing trains, changed since the launch began"
                raise self._failed(VerificationError, f"rank {rank}: {what}")
        self._frozen_sums = before
        several = [copy for copy in wanted if copy.copies > 1]
        if (difference := first_difference(several, [found[copy.name] for copy in several], ranks)) is not None:
            raise self._failed(VerificationError, str(difference))
        return len(several)

    def _failed(self, kind: type[TunerError], what: str) -> TunerError:
        """The error, with what there is to go back to."""
        step, saved, whole = self._progress.step, self._progress.saved_step, self._whole_at
        since = "" if whole is None else f"; all was well after step {whole}"
        hint = "look at the memory and the links of that machine, or leave it out; "
        if saved is None:
            hint += "no checkpoint was saved yet"
        elif whole is not None and saved > whole:
            newest = self._checkpoints / step_name(saved)
            hint += f"{newest} was saved after the last check: resume from one before it"
        else:
            hint += f"then: tuner resume {self._run_dir}"
        return kind(f"health check after step {step}: {what}{since}", hint=hint)


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
        if (taken := self._taken) is None:
            return
        yield from self._log.flush()
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
        "kind": "times", "step": taken.step, "tokens": taken.tokens,
        "compute_s": round(median(one.compute_s for one in times), 5),
        "compute_s_max": round(max(one.compute_s for one in times), 5),
        "wait_s_max": round(max(one.data_s for one in times), 5),
        "slowest_rank": slowest,
    }
