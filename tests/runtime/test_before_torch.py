"""What is settled before torch: how threads wait for each other and how torch keeps the memory of CUDA devices, where
the user says nothing; which cores a local rank is bound to, from made sysfs trees, for the length of a block; and the
launcher's variables.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.errors import MachineError
from tuner.runtime import before_torch, numa
from tuner.runtime.before_torch import SPIN_COUNT, expand_segments, limit_spinning, prepare_environment
from tuner.runtime.dist import RankInfo, first_host, rendezvous, threads_per_rank
from tuner.runtime.environment import safe_variables

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "version"
    path.touch()
    monkeypatch.setattr(before_torch, "_DRIVER", (path,))
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-45-generic")
    return path


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_set_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    expand_segments(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_not_without_a_device_on_wsl_or_once_cuda_has_begun(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        expand_segments(environment)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
        expand_segments(environment)
    assert environment == {}
    expand_segments(environment)
    assert environment == EXPANDABLE
    driver.unlink()
    without: dict[str, str] = {}
    expand_segments(without)
    assert without == {}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_the_user_lets_threads_wait_stays(name: str) -> None:
    environment = {name: "ACTIVE"}
    limit_spinning(environment)
    assert environment == {name: "ACTIVE"}


@pytest.mark.usefixtures("driver")
def test_threads_and_memory_are_prepared_together_and_recorded() -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment)
    assert environment == EXPANDABLE | {"GOMP_SPINCOUNT": SPIN_COUNT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert EXPANDABLE.items() <= safe_variables(environment).items(), "the run's record says so"
    louder = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    prepare_environment(louder)
    assert louder["TORCH_CPP_LOG_LEVEL"] == "INFO"


ENTRIES = (
    "from tuner.cli.main import main; main(['--version'])",
    "import tuner; tuner.train({'model': {'name_or_path': 'a/b'}, 'data': {'train': 'x'}})",
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_set_before_torch_is_loaded(entry: str, root: Path) -> None:
    program = f"""
import os, sys
class Torch:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise SystemExit
sys.meta_path.insert(0, Torch)
try:
    {entry}
except SystemExit:
    pass
print(os.environ["GOMP_SPINCOUNT"])
"""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment = unset | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines()[-1:] == [SPIN_COUNT], done.stderr


TWO_SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
"""16 threads of 8 physical cores: thread N + 8 is on the core of thread N."""


def made(root: Path, of_nodes: dict[int, str], devices: dict[str, str] | None = None, threads: int = 16) -> Path:
    for node, cores in of_nodes.items():
        directory = root / f"devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cores}\n")
    for core in range(threads):
        topology = root / f"devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for address, node in (devices or {}).items():
        directory = root / "bus/pci/devices" / address
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{node}\n")
    return root


def given_to(
    root: Path, mode: numa.Mode, ranks: int, devices: list[int] | None = None, allowed: set[int] | None = None
) -> list[str]:
    """The cores of each local rank, as text."""
    usable = set(range(16)) if allowed is None else allowed
    found = []
    for rank in range(ranks):
        info = RankInfo(rank, ranks, rank, ranks)
        near, of_nodes = numa.near_nodes(root, info, devices), numa.nodes(root, usable)
        found.append(numa.as_list(numa.cores_of(mode, info, near, of_nodes, numa.siblings(root, usable))))
    return found


def test_without_devices_ranks_are_split_evenly_by_node(tmp_path: Path) -> None:
    root = made(tmp_path, TWO_SOCKETS)
    assert given_to(root, "node", 2) == ["0-3,8-11", "4-7,12-15"]
    assert given_to(root, "node", 4) == ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2
    assert given_to(root, "exclusive", 4) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert given_to(root, "exclusive", 1) == given_to(root, "node", 1) == ["0-15"]
    assert given_to(root, "node", 2, allowed={0, 1, 5, 13}) == ["0-1", "5,13"]


def test_a_rank_is_near_its_device(tmp_path: Path) -> None:
    root = made(tmp_path, TWO_SOCKETS, {"0000:17:00.0": "1", "0000:ca:00.0": "0", "0000:00:01.0": "-1"})
    devices = [numa.device_node(root, address) for address in ("0000:17:00.0", "0000:ca:00.0", "0000:00:01.0")]
    assert devices == [1, 0, 0] and numa.device_node(root, "0000:ff:00.0") == 0
    assert given_to(root, "node", 3, devices) == ["4-7,12-15", "0-3,8-11", "0-3,8-11"]
    assert given_to(root, "exclusive", 3, devices) == ["4-7,12-15", "0-1,8-9", "2-3,10-11"]


def test_a_machine_that_knows_no_nodes_is_one(tmp_path: Path) -> None:
    assert given_to(tmp_path, "node", 2, allowed={0, 1, 2, 3}) == ["0-3", "0-3"]
    assert given_to(tmp_path, "exclusive", 2, allowed={0, 1, 2, 3}) == ["0-1", "2-3"]


def test_no_core_left_is_said(tmp_path: Path) -> None:
    root = made(tmp_path, TWO_SOCKETS)
    with pytest.raises(MachineError, match="local rank 1 of 2 has no core of its own on NUMA node 1 that this job may"):
        given_to(root, "node", 2, allowed={0, 1})


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_exclusive_parts_are_apart_and_leave_no_core_out(nodes: int, ranks: int, per_node: int) -> None:
    """Where each node has as many physical cores as ranks, or more."""
    width = per_node * ranks
    of_nodes = {node: set(range(node * width, (node + 1) * width)) for node in range(nodes)}
    alike = {core: frozenset({core}) for cores in of_nodes.values() for core in cores}
    seen: list[int] = []
    for rank in range(ranks):
        info = RankInfo(rank, ranks, rank, ranks)
        near = [frozenset(_nodes_of(nodes, ranks, each)) for each in range(ranks)]
        seen += numa.cores_of("exclusive", info, near, of_nodes, alike)
    assert sorted(seen) == sorted(alike)


def _nodes_of(nodes: int, ranks: int, rank: int) -> range:
    first = rank * nodes // ranks
    return range(first, first + 1 if nodes <= ranks else (rank + 1) * nodes // ranks)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores_read_back(cores: set[int]) -> None:
    assert numa.parse_list(numa.as_list(cores)) == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
def test_a_process_is_bound_for_the_length_of_a_block(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    root = made(tmp_path, {0: str(first)}, threads=0)
    with numa.bound("node", RankInfo(), "cpu", root) as cores:
        assert cores == str(first) and os.sched_getaffinity(0) == {first}
    assert os.sched_getaffinity(0) == before


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM: Any = cases(__file__, "slurm")


def test_single_process() -> None:
    rank_info = RankInfo.from_environment({})
    assert rank_info == RankInfo(0, 1, 0, 1)
    assert rank_info.is_main


def test_torchrun_wins_over_slurm() -> None:
    assert RankInfo.from_environment({**SLURM, **TORCHRUN}) == RankInfo(3, 4, 1, 2)
    assert not RankInfo.from_environment(TORCHRUN).is_main


def test_slurm_steps_with_several_tasks_only() -> None:
    assert RankInfo.from_environment(SLURM) == RankInfo(5, 7, 1, 2)
    assert RankInfo.from_environment({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == RankInfo()
    batch_script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert RankInfo.from_environment(batch_script) == RankInfo()


@pytest.mark.parametrize(("name", "value", "words"), cases(__file__, "contradictions_are_refused"))
def test_contradictions_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        RankInfo.from_environment({**TORCHRUN, name: value})


def test_rendezvous() -> None:
    assert rendezvous({"MASTER_ADDR": "h", "MASTER_PORT": "1"}) == "env://"
    several = rendezvous({**SLURM, "SLURM_NNODES": "4"})
    assert several.startswith("tcp://gpu03:")
    assert 20_000 <= int(several.rpartition(":")[2]) < 30_000
    assert several == rendezvous({**SLURM, "SLURM_NNODES": "4", "SLURM_PROCID": "0"})
    assert rendezvous({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).startswith("tcp://127.0.0.1:")
    with pytest.raises(MachineError, match="MASTER_ADDR"):
        rendezvous({})


@pytest.mark.parametrize(("nodes", "host"), cases(__file__, "first_host"))
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_every_rank_gets_a_thread() -> None:
    assert threads_per_rank(RankInfo(0, 4096, 0, 4096)) == 1
