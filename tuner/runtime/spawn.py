"""Several processes of one run on this machine: started and watched by the process that a person started.

That process joins no process group. It counts the stop signals (the ranks live in sessions of their own, so a Ctrl-C
reaches them through it alone) and says which rank failed and why, from the reports that the ranks leave as files:
an exit code alone is lost when a signal ends a process.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuner.errors import ExitCode, LostRankError, MachineError, TunerError, rebuilt
from tuner.runtime import phase
from tuner.runtime.dist import cores, log_name
from tuner.runtime.files import read_json, scratch_dir, write_json
from tuner.runtime.stop import COUNTED_ABOVE, StopSignals, held_back, undone
from tuner.runtime.warned import note_warning, read_warned

POLL_S = 0.05
GRACE_S = 3.0
"""What the others get to notice a failed rank and to end by themselves, before they are killed."""
KILL_S = 10
"""What a killed process gets to be gone: one in the kernel's uninterruptible sleep is left behind."""
JOB, WORKER = "job.json", "tuner.runtime.worker"


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
        name = f"{work.__module__}:{work.__qualname__}"
        about = {"work": name, "logs": str(logs), "parent": os.getpid(), "says": says}
        write_json(place / JOB, {**about, "job": dict(job)})
        ranks = _Ranks(place, logs)
        with StopSignals(at_once=ranks.kill) as signals:
            try:
                ranks.start(processes, port)
                ranks.watch(signals)
            finally:
                ranks.close()
                for text in read_warned(rank_file(place, 0, "warnings")):  # rank 0 said them on this process's stderr
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
class _End:
    """How a rank's process ended, and when that was seen."""

    rank: int
    code: int
    at_s: float
    report: RankReport | None

    def is_cut_short(self, number: int) -> bool:
        """Whether the stop signal came before the rank could heed it."""
        said = self.code if self.report is None else self.report.exit_code
        return self.code == -number or said == ExitCode.INTERRUPTED


@dataclass
class _Ranks:
    """The processes of this machine and what became of them."""

    place: Path
    logs: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ends: dict[int, _End] = field(default_factory=dict)
    stuck: tuple[int, ...] = ()
    """Ranks that still ran when the time after another one's failure was over."""

    def start(self, processes: int, port: int) -> None:
        """Start every rank in a session of its own, each with its share of the cores."""
        for rank in range(processes):
            environment = os.environ | _environment(rank, processes, port)
            command = [sys.executable, "-m", WORKER, str(self.place)]
            with held_back():  # a signal that is passed on while it starts waits until it is heeded
                self.processes[rank] = subprocess.Popen(command, env=environment, start_new_session=True)

    def running(self) -> dict[int, int]:
        """Process ids of the ranks that have not ended; those that have are written down."""
        found = {}
        for rank, process in self.processes.items():
            if rank in self.ends:
                continue
            if (code := process.poll()) is None:
                found[rank] = process.pid
            else:
                self.ends[rank] = _End(rank, code, time.monotonic(), self._report(rank))
        return found

    def watch(self, signals: StopSignals) -> None:
        """Wait for the ranks; pass the first signal on, and give the others little time once one has failed."""
        passed_on, failed_s = False, None
        while running := self.running():
            if signals.number is not None and not passed_on:
                _send(running.values(), signals.number)
                passed_on = True
            if failed_s is None and any(end.code != 0 for end in self.ends.values()):
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
                self.stuck = tuple(running)
                _send(running.values(), signal.SIGUSR2)  # has faulthandler write every thread's stack to the log
                time.sleep(0.5)
                return
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End what still runs, at once, and what it started."""
        for pid in self.running().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """End what still runs and wait until it is gone."""
        self.kill()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        self.running()

    def at(self, rank: int) -> str:
        """What a rank was doing when it last said so, to follow its name; empty where it said nothing."""
        return phase.at_last(rank_file(self.place, rank, "phase"))

    def _report(self, rank: int) -> RankReport | None:
        path = rank_file(self.place, rank, "json")
        return RankReport(**read_json(path)) if path.is_file() else None


def _result(ranks: _Ranks) -> dict[str, Any]:
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


def _told(ranks: _Ranks, report: RankReport, failed: list[RankReport]) -> TunerError:
    """A rank's error for the user; an error that all ranks agreed on is nobody's own."""
    agreed = len(failed) > 1 and all(other.message == report.message for other in failed)
    is_named = agreed or report.message.startswith("rank ")
    message = report.message if is_named else f"rank {report.rank}{ranks.at(report.rank)}: {report.message}"
    hint = report.hint
    if report.exit_code == ExitCode.BUG:
        hint = f"a bug in tuner; its traceback is at the end of {ranks.logs / log_name(report.rank)}"
    return rebuilt(report.kind, message, hint, report.exit_code)


def _died(ranks: _Ranks, end: _End) -> MachineError:
    log, named = ranks.logs / log_name(end.rank), f"rank {end.rank}"
    if end.code >= 0:
        message = f"{named} ended with code {end.code}{ranks.at(end.rank)} and said nothing"
        return MachineError(message, hint=f"see the end of {log}")
    name = signal.Signals(-end.code).name
    reason = {
        "SIGKILL": "the system kills a process that takes the last memory: see dmesg, and",
        "SIGABRT": "NCCL ends a process that waited longer than parallel.timeout so: see",
    }.get(name, "see")
    return MachineError(f"{named} was killed by {name}{ranks.at(end.rank)}", hint=f"{reason} the end of {log}")


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What a rank finds in its environment besides what is in this one: torchrun's variables and few more."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        COUNTED_ABOVE: "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's, rank 0 opens none
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes))),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
    if sys.platform == "linux":
        # Else gloo takes the address that the host's name resolves to, where it resolves.
        found["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return found


@contextlib.contextmanager
def local_store() -> Iterator[int]:
    """Keep the store through which the ranks find each other, and give its port; only this machine reaches it.

    Left alone, TCPStore listens on every address whatever the host name; so it is handed a socket of the loopback.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
