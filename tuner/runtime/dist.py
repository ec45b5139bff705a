"""Which process of how many this one is, as its launcher says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.errors import MachineError


def log_name(rank: int) -> str:
    """The file in which a process says what it does, in the directory of logs."""
    return f"rank{rank}.log"


@dataclass(frozen=True)
class RankInfo:
    """This process's place: `rank` of `world_size` in all, `local_rank` of `local_world_size` on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes shared files."""
        return self.rank == 0

    @staticmethod
    def is_given() -> bool:
        """Whether torchrun, or srun with several tasks, started this process and says which one it is."""
        return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or _is_slurm_task(os.environ)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> RankInfo:
        """Read torchrun's variables, else those of a SLURM step with several tasks; else a single process.

        Raises MachineError when they contradict one another.
        """
        values = os.environ if env is None else env
        if "RANK" in values and "WORLD_SIZE" in values:
            rank, size, local = _number(values, "RANK"), _number(values, "WORLD_SIZE"), _number(values, "LOCAL_RANK", 0)
            local_size = _number(values, "LOCAL_WORLD_SIZE", local + 1)
        elif _is_slurm_task(values):
            rank, size = _number(values, "SLURM_PROCID"), _number(values, "SLURM_NTASKS")
            local = _number(values, "SLURM_LOCALID", 0)
            local_size = _slurm_local_size(values, local)
        else:
            return cls()
        if not (0 <= rank < size and 0 <= local < local_size <= size):
            raise MachineError(
                f"the launcher's numbers contradict each other: rank {rank} of {size}, local rank {local} of "
                f"{local_size}",
                hint="unset RANK and WORLD_SIZE to run as a single process",
            )
        return cls(rank, size, local, local_size)


def _is_slurm_task(values: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in values and "SLURM_PROCID" in values and _number(values, "SLURM_NTASKS", 1) > 1


def _number(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = values.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        raise MachineError(f"environment variable {name}={text!r} is not a number")
    return int(text)


def _slurm_local_size(values: Mapping[str, str], local_rank: int) -> int:
    """Tasks on this node, from a list such as `2(x3),1` and this node's place in it."""
    text = values.get("SLURM_STEP_TASKS_PER_NODE") or values.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())) is None:
            return local_rank + 1
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(values, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else local_rank + 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(rank_info: RankInfo) -> int:
    """Each local rank's share of the cores, at least one."""
    return max(1, cores() // rank_info.local_world_size)


def rendezvous(env: Mapping[str, str]) -> str:
    """Where the ranks meet: `env://` under torchrun, else `tcp://host:port` derived from the SLURM step.

    Raises MachineError when neither says where.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return "env://"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    job = env.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdigit():
        said = "several processes were asked for but MASTER_ADDR and MASTER_PORT are not set"
        raise MachineError(said, hint="start them with torchrun or srun")
    one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else first_host(nodes))
    step = env.get("SLURM_STEP_ID", "0")
    port = env.get("MASTER_PORT") or str(20_000 + (int(job) * 7 + int(step if step.isdigit() else 0)) % 10_000)
    return f"tcp://{host}:{port}"


def first_host(nodes: str) -> str:
    """The first name of a SLURM host list: `gpu[03-07,9],login` -> `gpu03`. Raises MachineError."""
    if (match := re.match(r"([\w.-]+)(?:\[([\w-]+)[^\]]*\]([\w.-]*))?", nodes, flags=re.ASCII)) is None:
        raise MachineError(f"cannot read the SLURM host list {nodes!r}", hint="set MASTER_ADDR and MASTER_PORT")
    number = (match[2] or "").partition("-")[0]
    return match[1] + number + (match[3] or "")
