"""Processes of a proof: forked from one that has imported everything, in groups that take one layout after the other.

Fresh interpreters would import torch and transformers in each; a fork has them. The process that forks computes
nothing itself, so that no thread of a library is missing in its children.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import LostRankError, as_tuner_error
from tuner.runtime.dist import RankInfo, log_name
from tuner.runtime.files import read_json, write_json
from tuner.runtime.process import process_group
from tuner.runtime.spawn import local_store

POLL_S = 0.02
SILENT_S = 60.0
"""How long a collective waits for another process: steps of a small model take a fraction of a second."""
GRACE_S = 2 * SILENT_S
"""How long a group is waited for after one of its processes failed; the others notice by themselves before that."""

Work = Callable[[int, int], Any]
"""From the number of a job and a rank to plain values, the same on every rank."""


@dataclass(frozen=True)
class Failure:
    """A job that ended without an answer, in words."""

    message: str


def in_processes(processes: int, jobs: int, work: Work, place: Path) -> Iterator[Any | Failure]:
    """What ``work`` gives for each job in a group of so many processes, one after the other.

    A job that fails takes its group with it: the next ones get another. ``place`` is a directory of its own.
    """
    done = 0
    while done < jobs:
        group = _Group(processes, place / f"group-{done}")
        with group.started(range(done, jobs), work):
            while done < jobs:
                answer = group.answer(done)
                done += 1
                yield answer
                if isinstance(answer, Failure):
                    break


class _Group:
    """Forked processes that meet through a store of this process."""

    def __init__(self, processes: int, place: Path) -> None:
        self._processes, self._place = processes, place
        self._running: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._heard = self._held = -1

    @contextlib.contextmanager
    def started(self, jobs: Sequence[int], work: Work) -> Iterator[None]:
        """Have them run, and gone at the end."""
        self._place.mkdir()
        self._heard, self._held = os.pipe()  # its one end is open for as long as this process lives
        with local_store() as port:
            try:
                for rank in range(self._processes):
                    self._running[rank] = self._fork(rank, port, jobs, work)
                yield
            finally:
                self._end()
                os.close(self._heard)
                os.close(self._held)

    def answer(self, job: int) -> Any | Failure:
        """The answer of rank 0, once every rank has one; or the failure that came first."""
        path, failed_s = self._answer_path(job), None
        while not path.is_file():
            gone = self._gone()
            if failed_s is None and gone:
                failed_s = time.monotonic()
            if failed_s is not None and (not self._running or time.monotonic() - failed_s > GRACE_S):
                if path.is_file():  # it was written between the two looks
                    break
                return Failure(self._reason())
            time.sleep(POLL_S)
        return read_json(path)["answer"]

    def _answer_path(self, job: int) -> Path:
        return self._place / f"answer-{job}.json"

    def _error_path(self, rank: int) -> Path:
        return self._place / f"error-{rank}.json"

    def _gone(self) -> bool:
        """Whether any process ended otherwise than well; those that ended are no longer running."""
        for rank, pid in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[rank]
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self._running) < self._processes

    def _reason(self) -> str:
        """What the first rank to fail says; one that lost another says it only where nobody says more."""
        errors = [read_json(path) for rank in range(self._processes) if (path := self._error_path(rank)).is_file()]
        own = [error for error in errors if error["kind"] != LostRankError.__name__]
        if found := min(own or errors, key=lambda error: error["at_s"], default=None):
            return str(found["message"])
        rank, code = next(iter(self._codes.items()))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {rank} {how} and said nothing"

    def _end(self) -> None:
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._running.values():
            os.waitpid(pid, 0)
        self._running.clear()

    def _fork(self, rank: int, port: int, jobs: Sequence[int], work: Work) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which holds a lock of ours
            pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._as_rank(rank, port, jobs, work)
            code = 0
        except BaseException as error:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
            known = as_tuner_error(error)
            said = {"kind": type(known).__name__, "message": f"rank {rank}: {known.message}", "at_s": time.monotonic()}
            write_json(self._error_path(rank), said)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _as_rank(self, rank: int, port: int, jobs: Sequence[int], work: Work) -> None:
        """Be a rank: what it says goes to its log."""
        gc.freeze()  # the end of a group looks for cycles: among what is shared, that would copy it
        os.close(self._held)
        log = os.open(self._place / log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with process_group(RankInfo(rank, self._processes, rank, self._processes), "cpu", SILENT_S):
            for job in jobs:
                if select.select([self._heard], [], [], 0)[0]:  # who forked this was killed: nobody reads answers
                    return
                answer = work(job, rank)
                if rank == 0:
                    write_json(self._answer_path(job), {"answer": answer})
