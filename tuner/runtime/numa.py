"""Processes bound to cores near their device, or to their share of the machine by NUMA node (Linux, from sysfs).

torch has the same for CUDA as ``torchrun --numa-binding`` (torch.numa.binding); here it holds for ranks however
they were started, and on CPUs, too.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from tuner.errors import MachineError
from tuner.runtime.dist import RankInfo

Mode = Literal["node", "exclusive"]
SYSFS = Path("/sys")


@contextmanager
def bound(mode: Mode, rank_info: RankInfo, device: str, root: Path = SYSFS) -> Iterator[str]:
    """Within, this process and its threads run on the cores that ``mode`` gives it, which are yielded as a list.

    Raises MachineError where there are no such cores.
    """
    before = os.sched_getaffinity(0)
    near = device_nodes(root, rank_info) if device == "cuda" else None
    own = cores_of(mode, rank_info, near_nodes(root, rank_info, near), nodes(root, before), siblings(root, before))
    _bind(own)
    try:
        yield as_list(own)
    finally:
        _bind(before)


def cores_of(
    mode: Mode, rank_info: RankInfo, near: Sequence[Collection[int]], of_nodes: dict[int, set[int]],
    alike: dict[int, frozenset[int]],
) -> set[int]:
    """The cores of one local rank: those of its nodes, or with ``exclusive`` its part of them.

    ``near`` are the nodes of each local rank, ``of_nodes`` the cores of each node that may be used, ``alike`` the
    threads of each core's physical core, which are not parted. Raises MachineError where none is left.
    """
    mine = frozenset(near[rank_info.local_rank])
    cores = {core for node in mine for core in of_nodes.get(node, ())}
    if mode == "exclusive":
        sharing = [rank for rank, nodes_of in enumerate(near) if frozenset(nodes_of) & mine]
        physical = sorted({alike[core] & cores for core in cores}, key=min)
        place, count = sharing.index(rank_info.local_rank), len(sharing)
        part = physical[len(physical) * place // count : len(physical) * (place + 1) // count]
        cores = {core for group in part for core in group}
    if not cores:
        raise MachineError(
            f"parallel.numa_binding: {mode}: local rank {rank_info.local_rank} of {rank_info.local_world_size} has no "
            f"core of its own on NUMA node {', '.join(map(str, sorted(mine)))} that this job may use",
            hint="write numa_binding: node, or none",
        )
    return cores


def near_nodes(root: Path, rank_info: RankInfo, of_devices: Sequence[int] | None) -> list[frozenset[int]]:
    """The NUMA nodes of each local rank: that of its device, or without devices an even split of all of them.

    Where there are more ranks than nodes, neighbours share one; else a rank has several.
    """
    count = rank_info.local_world_size
    if of_devices is not None:
        return [frozenset({node}) for node in of_devices]
    known = sorted(_node_dirs(root))
    if len(known) <= count:
        return [frozenset({known[rank * len(known) // count]}) for rank in range(count)]
    cuts = [rank * len(known) // count for rank in range(count + 1)]
    return [frozenset(known[first:last]) for first, last in zip(cuts, cuts[1:], strict=False)]


def device_nodes(root: Path, rank_info: RankInfo) -> list[int]:
    """The NUMA node of each local rank's CUDA device. Where a process sees its own alone, all are taken to be there.
    """
    addresses = []
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        addresses.append(f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0")
    found = [device_node(root, address) for address in addresses]
    return found if len(found) >= rank_info.local_world_size else [found[0]] * rank_info.local_world_size


def device_node(root: Path, address: str) -> int:
    """The NUMA node of a PCI device; 0 where the system does not say, as on machines with one node."""
    with suppress(OSError, ValueError):
        return max(0, int((root / "bus/pci/devices" / address / "numa_node").read_text()))
    return 0


def nodes(root: Path, allowed: Collection[int]) -> dict[int, set[int]]:
    """The cores of each NUMA node among those that this process may use; one node of all where there are none."""
    may = set(allowed)
    found = _node_dirs(root).items()
    return {node: may if path is None else may & parse_list((path / "cpulist").read_text()) for node, path in found}


def siblings(root: Path, cores: Collection[int]) -> dict[int, frozenset[int]]:
    """The threads of the physical core that each core is one of; itself where the system does not say."""
    found = {core: frozenset({core}) for core in cores}
    for core in cores:
        with suppress(OSError, ValueError):
            path = root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            found[core] |= parse_list(path.read_text())
    return found


def parse_list(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def as_list(cores: Collection[int]) -> str:
    """The same list of numbers as text."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _node_dirs(root: Path) -> dict[int, Path | None]:
    """Where sysfs describes each node that has cores; one without a place where it knows none."""
    found: dict[int, Path | None] = {}
    for path in (root / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            if parse_list((path / "cpulist").read_text()):
                found[int(path.name.removeprefix("node"))] = path
    return found or {0: None}


def _bind(cores: Collection[int]) -> None:
    """Have every thread of this process run on these cores; threads that it starts later inherit that."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
