"""Several processes of one run on this machine: started and watched by the process that a person started.

That process joins no process group. It counts the stop signals (the ranks live in sessions of their own, so a Ctrl-C
reaches them through it alone) and says which rank failed and why, from the reports that the ranks leave as files:
an exit code alone is lost when a signal ends a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tuner.errors import ExitCode, LostRankError, MachineError, TunerError, rebuilt
from tuner.runtime import phase
from tuner.runtime.dist import RankInfo, log_name, threads_per_rank
from tuner.runtime.environment import python_path
from tuner.runtime.files import read_json, scratch_dir, write_json
from tuner.runtime.stop import COUNTED_ABOVE, StopSignals, held_back, undone
from tuner.runtime.warned import note_warning, read_warned

POLL_S = 0.05
GRACE_S = 3.0
"""What the others get to notice a failed rank and to end by themselves, before they are killed."""
KILL_S = 10
"""What a killed process gets to be gone: one in the kernel's uninterruptible sleep is left behind."""
JOB, WORKER = "job.json", "tuner.runtime.worker"
LOOPBACK = "127.0.0.1"


class StoreAddress(NamedTuple):
    """The address of a store through which ranks find each other."""

    host: str
    port: int


@dataclass(frozen=True)
class RankReport:
    """How a rank's work ended: its result, or the error in words. `at_s` is read from the monotonic clock."""

    rank: int
    at_s: float
    result: dict[str, Any] | None = None
    kind: str = ""
    exit_code: int = 0
    message: str = ""
    hint: str | None = None


def rank_file(place: Path, rank: int, kind: Literal["json", "warnings", "phase"]) -> Path:
    """Where a rank leaves its report, writes down its warnings as it says them, and shows what it is doing."""
    return place / f"rank{rank}.{kind}"


Work = Callable[[dict[str, Any]], dict[str, Any]]
"""What a rank does: a function of a module, from plain values to plain values."""


def run_ranks(work: Work, job: Mapping[str, Any], processes: int, logs: Path, says: str = "") -> dict[str, Any]:
    """Call `work` with `job` in `processes` ranks and return rank 0's result.

    Each rank is a fresh interpreter that imports `work` by its name. All ranks but the first write stderr to
    `logs/rankN.log`; the first one speaks for all, on this process's stderr, and while it starts it `says` so. The
    first stop signal is passed to every rank; the second one kills them and ends this process with 130.

    Raises the first failing rank's error, MachineError naming a rank that was killed or stopped answering, and
    KeyboardInterrupt where a stop signal came before the ranks could heed it.
    """
    with scratch_dir("tuner-ranks-") as place, local_store() as port:
        write_json(place / JOB, job_of(work, job, logs, says))
        return supervised(_LocalRanks(logs, place, processes, port))


def job_of(work: Work, job: Mapping[str, Any], logs: Path, says: str) -> dict[str, Any]:
    """What a rank that is this process's child finds in its `JOB` file."""
    name = f"{work.__module__}:{work.__qualname__}"
    return {"work": name, "logs": str(logs), "parent": os.getpid(), "says": says, "job": dict(job)}


def supervised(ranks: Ranks) -> dict[str, Any]:
    """Start ranks, watch them to their end and return rank 0's result; raises what `run_ranks` does."""
    with StopSignals(at_once=ranks.kill) as signals:
        try:
            ranks.start(signals)
            ranks.watch(signals)
        finally:
            ranks.close()
            for text in ranks.warned():  # rank 0 said them on this process's stderr
                note_warning(text)
        if signals.number is not None and any(end.is_cut_short(signals.number) for end in ranks.ends.values()):
            raise KeyboardInterrupt
        return _result(ranks)


def run_apart(work: Work, job: Mapping[str, Any], processes: int, name: str, is_heard: bool) -> dict[str, Any]:
    """The same for work that has no run directory: its logs stay where it fails, and the error names them."""
    logs = Path(tempfile.mkdtemp(prefix=f"tuner-{name}-"))
    with undone(lambda: shutil.rmtree(logs)):
        found = run_ranks(work, job, processes, logs, f"starting {processes} processes" if is_heard else "")
    shutil.rmtree(logs)
    return found


@dataclass(frozen=True)
class End:
    """How a rank's process ended, and when that was seen."""

    rank: int
    code: int
    at_s: float
    report: RankReport | None
    lost: str = ""
    """What was lost with it, of one whose process nobody can ask any more."""

    def is_cut_short(self, number: int) -> bool:
        """Whether the stop signal came before the rank could heed it."""
        said = self.code if self.report is None else self.report.exit_code
        return self.code == -number or said == ExitCode.INTERRUPTED


@dataclass
class Ranks(ABC):
    """The processes of a run, wherever they are, and what became of them."""

    logs: Path
    ends: dict[int, End] = field(default_factory=dict, init=False)
    stuck: tuple[int, ...] = field(default=(), init=False)
    """Ranks that still ran when the time after another one's failure was over."""

    @abstractmethod
    def start(self, signals: StopSignals) -> None:
        """Start every rank in a session of its own, each with its share of the cores."""

    @abstractmethod
    def running(self) -> list[int]:
        """The ranks that have not ended; those that have are written down."""

    @abstractmethod
    def send(self, number: int) -> None:
        """Send a signal to every rank that runs; SIGKILL also to what it started."""

    @abstractmethod
    def close(self) -> None:
        """End what still runs and wait until it is gone."""

    @abstractmethod
    def at(self, rank: int) -> str:
        """What a rank was doing when it last said so, to follow its name; empty where it said nothing."""

    @abstractmethod
    def warned(self) -> Iterable[str]:
        """What rank 0 has warned of."""

    def kill(self) -> None:
        """End what still runs, at once."""
        self.send(signal.SIGKILL)

    def watch(self, signals: StopSignals) -> None:
        """Wait for the ranks; pass the first signal on, and give the others little time once one has failed."""
        passed_on, failed_s = False, None
        while running := self.running():
            if signals.number is not None and not passed_on:
                self.send(signals.number)
                passed_on = True
            if failed_s is None and any(end.code != 0 for end in self.ends.values()):
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
                self.stuck = tuple(running)
                self.send(signal.SIGUSR2)  # has faulthandler write every thread's stack to the log
                time.sleep(0.5)
                return
            time.sleep(POLL_S)


@dataclass
class _LocalRanks(Ranks):
    """Those of this machine, which this process starts."""

    place: Path
    count: int
    port: int
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, signals: StopSignals) -> None:
        """Each is a child of this process."""
        for rank in range(self.count):
            rank_info = RankInfo(rank, self.count, rank, self.count)
            environment = rank_environment(rank_info, StoreAddress(LOOPBACK, self.port), os.environ)
            self.processes[rank] = start_rank(self.place, environment)

    def running(self) -> list[int]:
        """As their exit codes say."""
        for rank, process in self.processes.items():
            if rank not in self.ends and (code := process.poll()) is not None:
                self.ends[rank] = End(rank, code, time.monotonic(), report_of(self.place, rank))
        return [rank for rank in self.processes if rank not in self.ends]

    def send(self, number: int) -> None:
        """By process id."""
        for rank in self.running():
            send(self.processes[rank].pid, number)

    def close(self) -> None:
        """One in the kernel's uninterruptible sleep is left behind."""
        self.kill()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        self.running()

    def at(self, rank: int) -> str:
        """From the file that it shows it in."""
        return phase.at_last(rank_file(self.place, rank, "phase"))

    def warned(self) -> Iterable[str]:
        """From the file that it wrote them down in."""
        return read_warned(rank_file(self.place, 0, "warnings"))


def start_rank(place: Path, environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start the rank whose job is in `place`, in a session of its own; `options` are Popen's."""
    with held_back():  # a signal that is passed on while it starts waits until it is heeded
        command = [sys.executable, "-m", WORKER, str(place)]
        return subprocess.Popen(command, env=dict(environment), start_new_session=True, **options)


def report_of(place: Path, rank: int) -> RankReport | None:
    """The report that a rank has left; None where it left none."""
    path = rank_file(place, rank, "json")
    return RankReport(**read_json(path)) if path.is_file() else None


def send(pid: int, number: int) -> None:
    """Send a signal to a rank; SIGKILL goes to all that it started, too. One that has ended gets none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def _result(ranks: Ranks) -> dict[str, Any]:
    """Rank 0's result, or the cause of the failure: what happened first and follows from nothing else."""
    ends = ranks.ends
    reports = [end.report for end in ends.values() if end.report is not None]
    first = ends[0].report if 0 in ends else None
    if first is not None and first.result is not None and all(end.code == 0 for end in ends.values()):
        return first.result
    # A rank that ended without a word has ended up to one look at it before it was seen to.
    silent = [(e.at_s - POLL_S, e.rank) for e in ends.values() if e.report is None and e.rank not in ranks.stuck]
    failed = [r for r in reports if r.result is None]
    own = [(r.at_s, r.rank) for r in failed if r.kind != LostRankError.__name__]
    if silent or own:
        _, rank = min(silent + own)
        report = ends[rank].report
        raise _died(ranks, ends[rank]) if report is None else _told(ranks, report, failed)
    if ranks.stuck:
        named = "rank " + ", ".join(f"{rank}{ranks.at(rank)}" for rank in ranks.stuck)
        raise MachineError(
            f"{named} stopped answering, and the others waited for parallel.timeout",
            hint=f"what it was doing is at the end of {ranks.logs / log_name(ranks.stuck[0])}",
        )
    raise _told(ranks, min(failed, key=lambda report: report.at_s), failed)


def _told(ranks: Ranks, report: RankReport, failed: list[RankReport]) -> TunerError:
    """A rank's error for the user; an error that all ranks agreed on is nobody's own."""
    agreed = len(failed) > 1 and all(other.message == report.message for other in failed)
    is_named = agreed or report.message.startswith("rank ")
    message = report.message if is_named else f"rank {report.rank}{ranks.at(report.rank)}: {report.message}"
    hint = report.hint
    if report.exit_code == ExitCode.BUG:
        hint = f"a bug in tuner; its traceback is at the end of {ranks.logs / log_name(report.rank)}"
    return rebuilt(report.kind, message, hint, report.exit_code)


def _died(ranks: Ranks, end: End) -> MachineError:
    log, named = ranks.logs / log_name(end.rank), f"rank {end.rank}"
    if end.lost:
        return MachineError(f"{named} was lost{ranks.at(end.rank)}: {end.lost}", hint=f"see the end of {log}")
    if end.code >= 0:
        message = f"{named} ended with code {end.code}{ranks.at(end.rank)} and said nothing"
        return MachineError(message, hint=f"see the end of {log}")
    name = signal.Signals(-end.code).name
    reason = {
        "SIGKILL": "the system kills a process that takes the last memory: see dmesg, and",
        "SIGABRT": "NCCL ends a process that waited longer than parallel.timeout so: see",
    }.get(name, "see")
    return MachineError(f"{named} was killed by {name}{ranks.at(end.rank)}", hint=f"{reason} the end of {log}")


def rank_environment(rank_info: RankInfo, store: StoreAddress, own: Mapping[str, str]) -> dict[str, str]:
    """What a rank finds in its environment: torchrun's variables and few more in its machine's `own`.

    `store` is where the ranks meet, and belongs to whoever started them.
    """
    found = {
        "RANK": str(rank_info.rank), "WORLD_SIZE": str(rank_info.world_size),
        "LOCAL_RANK": str(rank_info.local_rank), "LOCAL_WORLD_SIZE": str(rank_info.local_world_size),
        "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port),
        COUNTED_ABOVE: "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is that of whoever started them, rank 0 opens none
        "OMP_NUM_THREADS": own.get("OMP_NUM_THREADS", str(threads_per_rank(rank_info))),
        "PYTHONPATH": python_path(own),
    }
    if sys.platform == "linux" and store.host == LOOPBACK:
        # Else gloo takes the address that the host's name resolves to, where it resolves.
        found["GLOO_SOCKET_IFNAME"] = own.get("GLOO_SOCKET_IFNAME", "lo")
    return {**own, **found}


@contextlib.contextmanager
def local_store(host: str = LOOPBACK) -> Iterator[int]:
    """Keep the store through which the ranks find each other, and give its port; it is reached at `host` alone.

    Left alone, TCPStore listens on every address whatever the host name; so it is handed a socket of that one.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store

