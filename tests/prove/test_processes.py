"""Groups of forked processes: answers in order, and a group for what comes after one that failed."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tuner.errors import MachineError
from tuner.prove.prove import Failure, in_processes


def children() -> set[str]:
    """The processes that this one has started, those that it has not waited for included."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_a_failed_job_takes_its_group_and_no_other_job(tmp_path: Path) -> None:
    def work(job: int, rank: int) -> Any:
        if job == 1 and rank == 1:
            raise MachineError("no room")
        if job == 2 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([rank + job])
        dist.all_reduce(total)
        return {"sum": int(total), "parent": os.getppid()}

    before = children()
    first, refused, killed, last = in_processes(2, 4, work, tmp_path)
    assert (first, last) == ({"sum": 1, "parent": os.getpid()}, {"sum": 7, "parent": os.getpid()})
    assert refused == Failure("rank 1: no room")
    assert isinstance(killed, Failure) and "rank 1 lost another process" in killed.message
    assert children() == before
