"""Real processes that join, agree and leave."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fixtures import forked
from tests.fixtures.constructors import replace_constructor
from tests.fixtures.processes import run_ranks
from tests.fixtures.tables import cases
from tests.test_errors import NCCL, UNHANDLED
from tuner.errors import DataError, ExitCode, LostRankError, MachineError
from tuner.runtime import process
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective, any_rank, device_index, gloo_group, process_group

SCRIPT = """
import os, sys
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank
from tuner.runtime.process import gloo_group
from tuner.runtime.process import from_rank0, process_group
import torch, torch.distributed as dist
launch = RankInfo.from_environment()
for number in range(3):
    assert from_rank0(launch, 30.0, "abandoned", lambda: f"{launch.rank} {number}") == f"0 {number}"
    with process_group(launch, "cpu", 30.0):
        group = gloo_group()
        assert group is gloo_group() and dist.get_world_size(group) == 2
        assert any_rank(launch.rank == 1, group) and not any_rank(False, group)
        assert torch.get_num_threads() == int(sys.argv[1])
    assert not dist.is_initialized() and gloo_group() is None
    assert from_rank0(launch, 30.0, "abandoned", lambda: f"{launch.rank} {-number}") == f"0 {-number}"
with process_group(launch, "cpu", 30.0):  # which all leave together: under SLURM rank 0 holds what rank 1 reads
    pass
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ended(root: Path, env: dict[str, str], script: str, *arguments: str) -> list[int]:
    """The exit codes of two ranks."""
    base = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | env
    processes = [
        forked.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=root,
            env={**base, **{key: value.replace("%", str(rank)) for key, value in env.items()}},
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.multi
@pytest.mark.parametrize("launcher", ["torchrun", "agent", "slurm"])
def test_two_processes_join_agree_and_leave(root: Path, launcher: str) -> None:
    """Again and again, as the trainings of one program do; torchrun's own store keeps the keys of all of them."""
    hosted = None
    if launcher != "slurm":
        env = {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "%", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        threads = 1
        if launcher == "agent":
            hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env |= {"MASTER_PORT": str(hosted.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    else:
        env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "%", "SLURM_NTASKS": "2", "SLURM_LOCALID": "%"}
        env |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1"}
        env |= {"SLURM_JOB_NODELIST": "here"}
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended(root, {**env, "GLOO_SOCKET_IFNAME": "lo"}, SCRIPT, str(threads)) == [0, 0]


@pytest.mark.multi
def test_what_ranks_make_arrives_where_it_is_wanted_alone(tmp_path: Path) -> None:
    everywhere = dist.all_gather_object
    sent: list[object] = []

    def gathered(answers: list[object], own: object, group: dist.ProcessGroup) -> None:
        sent.append(own)
        everywhere(answers, own, group=group)

    def bad(rank: int) -> str:
        if rank == 1:
            raise DataError("bad row")
        return f"of {rank}"

    def work(rank: int) -> None:
        dist.all_gather_object = gathered
        ranks = Collective(dist.group.WORLD)
        assert ranks.together(lambda: rank) == rank
        assert ranks.to_rank0(lambda: rank) == ([] if rank else [0, 1, 2])
        assert ranks.on_rank0(lambda: f"of {rank}") == "of 0"
        assert ranks.from_rank0(lambda: [f"from {rank}: {each}" for each in "abc"]) == f"from 0: {'abc'[rank]}"
        assert sent == [], "nobody gets what is another's"
        assert ranks.on_all_ranks(lambda: rank) == [0, 1, 2]
        for kind in (ranks.together, ranks.to_rank0, ranks.on_all_ranks):
            with pytest.raises(DataError, match="rank 1: bad row"):
                kind(lambda: bad(rank))
        for alone in (ranks.on_rank0, ranks.from_rank0):
            with pytest.raises(DataError, match="rank 0: bad row"):
                alone(lambda: bad(1))

    assert run_ranks(3, tmp_path, work) == [0, 0, 0]
    alone = Collective(None)
    assert (alone.to_rank0(lambda: 1), alone.from_rank0(lambda: [2]), alone.on_rank0(lambda: 3)) == ([1], 2, 3)


def test_a_single_process_starts_nothing() -> None:
    with process_group(RankInfo(), "cpu", 1.0):
        assert gloo_group() is None
    assert any_rank(True, None)
    assert not any_rank(False, None)


def test_nowhere_to_meet_is_one_clear_line() -> None:
    with pytest.raises(MachineError, match="MASTER_ADDR"), process_group(RankInfo(0, 2, 0, 2), "cpu", 1.0):
        pass


FAIL = """
import os, sys, time
from tuner.runtime import process
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import any_rank
from tuner.runtime.process import gloo_group
from tuner.runtime.process import process_group
from tuner.errors import DataError, LostRankError
process.LAZY_FROM = int(sys.argv[3])
launch = RankInfo.from_environment()
try:
    with process_group(launch, "cpu", float(sys.argv[2])):
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == (None if process.LAZY_FROM > 2 else "1")
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
@pytest.mark.parametrize("lazy_from", ["256", "2"])
@pytest.mark.parametrize(("what", "timeout_s", "codes"), [("fails", "60", [9, 3]), ("sleeps", "4", [9, 9])])
def test_a_rank_that_fails_or_is_silent_ends_the_others_wait(
    root: Path, what: str, timeout_s: str, codes: list[int], lazy_from: str
) -> None:
    env = {"RANK": "%", "WORLD_SIZE": "2", "LOCAL_RANK": "%", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    assert ended(root, env, FAIL, what, timeout_s, lazy_from) == codes


@pytest.mark.parametrize(
    ("visible", "ranks", "index"), cases(__file__, "a_process_that_sees_one_device_of_its_own_takes_it")
)
def test_a_process_that_sees_one_device_of_its_own_takes_it(
    visible: int, ranks: list[int], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runtime.device import DeviceFacts
    from tuner.setup.model import _device

    rank_info = RankInfo(*ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert device_index(rank_info) == index
    assert _device(DeviceFacts("cuda", "a device", 1, 1, True, 1), rank_info) == torch.device("cuda", index)


@pytest.mark.multi
@pytest.mark.parametrize("shared", [False, True])
def test_two_processes_on_one_device_are_told_so(shared: bool, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        class Properties:
            uuid = "GPU-1" if shared else f"GPU-{rank}"

        torch.cuda.get_device_properties = lambda device: Properties()  # type: ignore[assignment,return-value]
        try:
            process._require_own_devices(torch.device("cuda", 0), gloo_group(20.0))
        except MachineError as error:
            assert shared and error.message.startswith("ranks 0 and 1 have one CUDA device between them, on ")
        else:
            assert not shared

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NCCL.format("remote process exited or there was a network error") + ", NCCL version 2.29.3\nncclRemoteError: "
         "A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
         "socketPoll: Connection reset by peer", "socketPoll: Connection reset by peer"),
        ("NCCL communicator was aborted on rank 1.", "NCCL communicator was aborted on rank 1."),
    ],
)  # fmt: skip
def test_nccl_s_errors_are_another_process_s_end(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda **options: None)
    monkeypatch.setattr(process, "_meet", lambda *args: None)
    rank_info = RankInfo(1, 2, 1, 2)
    with pytest.raises(LostRankError, match="rank 1 lost another") as raised, process_group(rank_info, "cpu", 1.0):
        raise dist.DistBackendError(text)
    assert raised.value.exit_code == ExitCode.ENVIRONMENT
    assert raised.value.message.endswith(f"(NCCL: {said})")


def test_nccl_without_memory_is_no_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda **options: None)
    monkeypatch.setattr(process, "_meet", lambda *args: None)
    with pytest.raises(dist.DistBackendError, match="calloc"), process_group(RankInfo(1, 2, 1, 2), "cpu", 1.0):
        raise dist.DistBackendError(UNHANDLED + "Failed to CUDA calloc 8 bytes")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ("unhandled system error\nLast error:\nsocketStartConnect: Connect to 10.0.0.2 failed", MachineError,
         "rank 5 of 16 could not join the others: socketStartConnect: Connect to 10.0.0.2 failed"),
        ("unhandled cuda error\nLast error:\nFailed to CUDA calloc 8 bytes", dist.DistBackendError, "Failed to CUDA"),
    ],
)  # fmt: skip
def test_nccl_connects_where_the_processes_meet_on_the_device_of_each(
    words: str, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    zeros = torch.zeros

    def fails(tensor: torch.Tensor) -> None:
        done.append("connect")
        raise dist.DistBackendError(NCCL.format(words))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    replace_constructor(monkeypatch, "zeros", lambda size, device: (done.append(device), zeros(size))[1])
    monkeypatch.setattr(dist, "init_process_group", lambda **options: done.append(options["backend"]))
    monkeypatch.setattr(dist, "all_reduce", fails)
    monkeypatch.setattr(process, "_meet", lambda *args: None)
    monkeypatch.setattr(process, "gloo_group", lambda *args: None)
    monkeypatch.setattr(process, "_require_own_devices", lambda own, group: done.append("own"))
    with pytest.raises(kind, match=said), process_group(RankInfo(5, 16, 5, 8), "cuda", 1.0):
        raise AssertionError("joined")
    own = torch.device("cuda", 0)
    assert done == [own, "cpu:gloo,cuda:nccl", "own", own, "connect"]
