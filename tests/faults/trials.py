"""One trial: strike, judge what is left, finish the work, judge the result."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.faults.bench import Bench
from tests.faults.calls import Call
from tests.faults.cases import Job
from tests.faults.disk import MODES, Disk, Mode, lay_out
from tests.faults.evidence import label, phase
from tests.faults.ranks import HANGS
from tests.faults.supervisor import Fault, Kind, Trace


@dataclass(frozen=True)
class AnyPoint(ABC):
    """One trial of a campaign, by its number: a job of a case."""

    number: int
    case: str
    job: str

    @property
    @abstractmethod
    def words(self) -> str:
        """What happens, in a line."""


@dataclass(frozen=True)
class Point(AnyPoint):
    """The faults of one launch after the other."""

    faults: tuple[Fault, ...]

    @property
    def words(self) -> str:
        """What happens, in a line."""
        return ", then ".join(f"{fault.kind} at {fault.at}" for fault in self.faults)


@dataclass(frozen=True)
class PowerPoint(AnyPoint):
    """One power loss: where in the calls of a job (a fraction), what of the unflushed is there, and a seed for it."""

    place: float
    mode: Mode
    killed: int
    """The call at which the job was killed before, and begun again; 0 for none."""
    seed: int

    @property
    def words(self) -> str:
        """What happens, in a line."""
        before = f"killed at {self.killed}, then " if self.killed else ""
        return f"{before}power lost after {self.place:.3f} of the calls, {self.mode} of the unflushed is there"


@dataclass
class Verdict:
    """What a trial showed."""

    point: AnyPoint
    where: list[str]
    """The calls that were struck: phase, call and file."""
    struck: int
    problems: list[str] = field(default_factory=list)
    lost_steps: int = 0
    ms: float = 0.0
    """How long it took, where that was measured."""
    code: int = 0
    grown_mib: int = 0
    peak_mib: int = 0
    """As a program of its own, where that was tried."""

    def as_json(self) -> dict[str, Any]:
        """For a line of JSON."""
        point = self.point
        return {
            "point": point.number, "case": point.case, "job": point.job, "faults": point.words, "where": self.where,
            "struck": self.struck, "problems": self.problems, "ms": round(self.ms), "code": self.code,
            "grown_mib": self.grown_mib, "peak_mib": self.peak_mib,
        }


def kill_points(benches: Sequence[Bench], jobs: Sequence[str] = ()) -> Iterator[Point]:
    """Every call of every job: killed before it, and in the middle of every write."""
    return _at_every_call(benches, jobs, ("kill",), "tear")


def _at_every_call(
    benches: Sequence[Bench], jobs: Sequence[str], kinds: tuple[Kind, ...], of_writes: Kind
) -> Iterator[Point]:
    numbers = count()
    for bench in benches:
        for job in jobs or bench.jobs:
            for at, call in enumerate(bench.traces[job].calls, 1):
                for kind in (*kinds, of_writes) if call.kind == "write" and call.size > 1 else kinds:
                    yield Point(next(numbers), bench.case, job, (Fault(at, kind),))


def rank_points(benches: Sequence[Bench], trials: int, seed: int) -> Iterator[Point]:
    """Any call of any rank of a training or a resume: all ranks die there, or the one alone."""
    rng = random.Random(seed)
    for number in range(trials):
        bench = benches[number % len(benches)]
        job = rng.choice(("train", "resume"))
        fault = Fault(rng.randint(1, len(bench.traces[job].calls)), rng.choice(("kill", "tear", "kill-one")))
        yield Point(number, bench.case, job, (fault,))


def compound_points(benches: Sequence[Bench], trials: int, seed: int) -> Iterator[Point]:
    """Killed at any call, then again while it recovers, and every third once more."""
    rng = random.Random(seed)
    for number in range(trials):
        bench = benches[number % len(benches)]
        job = rng.choice(sorted(bench.jobs))
        calls = len(bench.traces[job].calls)
        faults = tuple(Fault(rng.randint(1, calls), rng.choice(_KILLS)) for _ in range(3 if number % 3 == 0 else 2))
        yield Point(number, bench.case, job, faults)


def error_points(benches: Sequence[Bench], jobs: Sequence[str] = ()) -> Iterator[Point]:
    """At every call: a disk that is full from there on, EIO, and for a write half of its bytes."""
    return _at_every_call(benches, jobs, ("full", "error"), "short")


_HARMLESS = ("close", "unlink", "rmdir", "truncate", "copy", "link", "mkdir")
_IDLE = re.compile(r"/logs/|/cache/exports")
_KILLS: tuple[Kind, ...] = ("kill", "tear")


def kill_trial(bench: Bench, point: Point) -> Verdict:
    """Kill, judge what is left; likewise for each further kill of the recovery; then finish and judge that."""
    job = bench.jobs[point.job]
    bench.restore(job.start)
    verdict = Verdict(point, [], 0)
    command, committed = job.command, bench.committed(job.start, Trace())
    for fault in point.faults:
        trace = bench.run(command, fault)
        _note(verdict, bench, trace)
        if not trace.struck:
            verdict.problems += _ended(trace, (0,))
        committed = max(filter(None, (committed, bench.committed(job.start, trace))), default=None)
        verdict.problems += bench.problems(job, committed)
        command = bench.next_command(job)
        if trace.code == HANGS:
            verdict.problems.append(f"hangs: {trace.output[-200:]}")
    _finish(verdict, bench, job, committed)
    return verdict


def error_trial(bench: Bench, point: Point) -> Verdict:
    """A call fails: what was there stays, the error says where, and the same command finishes the work afterwards."""
    job, (fault,) = bench.jobs[point.job], point.faults
    bench.restore(job.start)
    verdict = Verdict(point, [], 0)
    trace = bench.run(job.command, fault)
    _note(verdict, bench, trace)
    committed = bench.committed(job.start, trace)
    if trace.struck:
        verdict.problems += _told(bench, trace, fault)
    verdict.problems += bench.problems(job, committed)
    _finish(verdict, bench, job, committed)
    return verdict


def _note(verdict: Verdict, bench: Bench, trace: Trace) -> None:
    if trace.hung:
        verdict.problems.append("it hangs")
    if trace.struck:
        call = struck_call(trace)
        verdict.struck += 1
        verdict.where.append(f"{phase(call)}: {label(call, bench.root)}")
    verdict.problems += [f"changed outside: {call.path}" for call in bench.outside(trace)]


def struck_call(trace: Trace) -> Call:
    """The call at which a fault struck."""
    return trace.calls[trace.struck_at - 1]


def _finish(verdict: Verdict, bench: Bench, job: Job, committed: int | None) -> None:
    """Do the rest of the work without a fault, and hold the end against that of unbroken work."""
    before = len(bench.launches())
    trace = bench.run(bench.next_command(job))
    verdict.problems += _ended(trace, (0,))
    verdict.problems += [f"changed outside: {call.path}" for call in bench.outside(trace)]
    if trace.code:
        return
    begun = bench.launches()[before:] if job.name in ("train", "resume") else []
    if begun and committed is not None and begun[0]["from_step"] < committed:
        verdict.lost_steps = committed - begun[0]["from_step"]
        verdict.problems.append(f"went on from step {begun[0]['from_step']}, step {committed} was committed")
    verdict.problems += bench.final_problems(job)


def _ended(trace: Trace, codes: tuple[int, ...]) -> list[str]:
    if trace.code in codes:
        return []
    return [f"exit code {trace.code}: {' | '.join(trace.output.strip().splitlines()[-3:])[-400:]}"]


def _told(bench: Bench, trace: Trace, fault: Fault) -> list[str]:
    """What is wrong with how a command ended after a call of its own failed."""
    call = struck_call(trace)
    if fault.kind == "short":
        return _ended(trace, (0,))
    words = {"full": "No space left on device", "error": "Input/output error"}[fault.kind]
    if trace.code == 0:
        # Closing, clearing away, making what is there, copies that are made in another way then, logs, notes.
        harmless = call.kind in _HARMLESS or _IDLE.search(call.path) or "/.trash-tmp-" in call.other
        return [] if harmless else [f"{label(call, bench.root)} failed unnoticed"]
    found = _ended(trace, (4,))
    error = next((line for line in trace.output.splitlines() if line.startswith("error: ")), "")
    if words not in error and call.kind != "close":  # Arrow does not say why it could not
        found.append(f"the error does not say why: {error or trace.output[-200:]}")
    if str(bench.root) not in error:
        found.append(f"the error names no path: {error}")
    if fault.kind == "full" and phase(call) == "save" and "needed" not in error:
        found.append(f"the error names no bytes: {error}")
    return found


def power_points(benches: Sequence[Bench], trials: int, seed: int) -> Iterator[PowerPoint]:
    """States that a power loss leaves after any call: of a job, or of one that recovers from a kill."""
    rng = random.Random(seed)
    for number in range(trials):
        bench = benches[number % len(benches)]
        job = rng.choice(sorted(bench.jobs))
        killed = rng.randint(1, len(bench.traces[job].calls)) if rng.random() < 0.25 else 0
        place, mode = rng.random(), rng.choice(MODES)
        yield PowerPoint(number, bench.case, job, place, mode, killed, rng.getrandbits(32))


def power_trial(bench: Bench, point: PowerPoint) -> Verdict:
    """Lose power after some call: what is left is judged as after a kill, by the commits that were flushed."""
    job = bench.jobs[point.job]
    disk = Disk(bench.directory / job.start, bench.root)
    verdict = Verdict(point, [], 0)
    trace = bench.traces[job.name]
    committed = None
    if point.killed:
        bench.restore(job.start)
        broken = bench.run(job.command, Fault(point.killed, "kill"), record=True)
        disk.apply(broken.calls[: point.killed - 1])
        committed = bench.committed(job.start, broken, durable=True)
        trace = bench.run(bench.next_command(job), record=True)
    calls = trace.calls[: round(point.place * len(trace.calls))]
    disk.apply(calls)
    again = bench.committed(job.start, Trace(calls), durable=True)
    committed = max((step for step in (committed, again) if step is not None), default=None)
    verdict.struck = int(not disk.settled)
    verdict.where = [f"{phase(calls[-1])}: {label(calls[-1], bench.root)}" if calls else "the beginning"]
    bench.clear()
    lay_out(disk.image(point.mode, random.Random(point.seed)), bench.root)
    verdict.problems += bench.problems(job, committed)
    _finish(verdict, bench, job, committed)
    return verdict
