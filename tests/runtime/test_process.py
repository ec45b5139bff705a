"""Real processes that join, agree and leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures import forked
from tuner.errors import MachineError
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank, gloo_group, process_group

SCRIPT = """
import os, sys
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank
from tuner.runtime.process import gloo_group
from tuner.runtime.process import process_group
import torch, torch.distributed as dist
launch = RankInfo.from_environment()
with process_group(launch, "cpu", 30.0):
    group = gloo_group()
    assert group is gloo_group() and dist.get_world_size(group) == 2
    assert any_rank(launch.rank == 1, group) and not any_rank(False, group)
    assert torch.get_num_threads() == int(sys.argv[1])
assert not dist.is_initialized() and gloo_group() is None
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(root: Path, env: dict[str, str], script: str, *arguments: str) -> list[subprocess.Popen[bytes]]:
    base = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | env
    return [
        forked.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=root,
            env={**base, **{key: value.replace("%", str(rank)) for key, value in env.items()}},
        )
        for rank in range(2)
    ]


@pytest.mark.multi
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_two_processes_join_agree_and_leave(root: Path, launcher: str) -> None:
    if launcher == "torchrun":
        env = {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "%", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        threads = 1
    else:
        env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "%", "SLURM_NTASKS": "2", "SLURM_LOCALID": "%"}
        env |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1"}
        env |= {"SLURM_JOB_NODELIST": "here"}
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
    processes = start(root, {**env, "GLOO_SOCKET_IFNAME": "lo"}, SCRIPT, str(threads))
    try:
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_single_process_starts_nothing() -> None:
    with process_group(RankInfo(), "cpu", 1.0):
        assert gloo_group() is None
    assert any_rank(True, None)
    assert not any_rank(False, None)


def test_nowhere_to_meet_is_one_clear_line() -> None:
    with pytest.raises(MachineError, match="MASTER_ADDR"), process_group(RankInfo(0, 2, 0, 2), "cpu", 1.0):
        pass


FAIL = """
import sys, time
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank
from tuner.runtime.process import gloo_group
from tuner.runtime.process import process_group
from tuner.errors import DataError, LostRankError
launch = RankInfo.from_environment()
try:
    with process_group(launch, "cpu", float(sys.argv[2])):
        if launch.rank == 1:
            if sys.argv[1] == "fails":
                raise DataError("bad row")
            time.sleep(float(sys.argv[2]) + 2.5)
        any_rank(False, gloo_group())
except DataError:
    sys.exit(3)
except LostRankError:
    sys.exit(9)
"""


def test_a_rank_alone_waits_no_longer_than_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    started = time.monotonic()
    other = RankInfo(1, 2, 1, 2)
    with pytest.raises(MachineError, match="rank 1 of 2 could not join"), process_group(other, "cpu", 4.0):
        pass
    assert time.monotonic() - started < 7.5, "torch tries twice"


@pytest.mark.multi
@pytest.mark.parametrize(("what", "timeout_s", "codes"), [("fails", "60", [9, 3]), ("sleeps", "4", [9, 9])])
def test_a_rank_that_fails_or_is_silent_ends_the_others_wait(
    root: Path, what: str, timeout_s: str, codes: list[int]
) -> None:
    env = {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "%", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = start(root, env, FAIL, what, timeout_s)
    try:
        assert [process.wait(30) for process in processes] == codes
    finally:
        for process in processes:
            process.kill()
            process.wait()
