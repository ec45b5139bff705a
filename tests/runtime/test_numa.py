"""Which cores a local rank is bound to, from made sysfs trees; a process is bound for the length of a block."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import MachineError
from tuner.runtime import numa
from tuner.runtime.dist import RankInfo

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
