"""Optimizer states in the host's memory: how much a recipe keeps there, and whether there is room."""

from __future__ import annotations

from tuner.errors import MemoryLimitError
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.runtime.memory import host_memory
from tuner.setup.less_memory import less_memory
from tuner.setup.resolve import Resolved
from tuner.setup.specs import trained_count, weight_parts
from tuner.train.host_adamw import DOWN_BYTES, STATE_BYTES, UP_BYTES, buffer_bytes


def announce_host_states(console: Console, resolved: Resolved, rank_info: RankInfo) -> None:
    """Say what the states of a resolved recipe take of this machine's memory.

    Raises MemoryLimitError where they take more than is free.
    """
    trained = trained_count(resolved)
    needed, free = host_bytes(resolved, trained, rank_info), host_memory()[1]
    if needed > free:
        raise MemoryLimitError(
            f"optimizer.offload: the states of {trained:,} parameters take {gib(needed)} of the host's memory, of "
            f"which {gib(free)} is free",
            hint="write offload: none on a device that holds them, or " + less_memory(resolved),
        )
    console.say(
        "optimizer",
        f"states in {gib(needed)} of the host's memory, {gib(free)} free; of each parameter {DOWN_BYTES} bytes come to "
        f"the host in a step and {UP_BYTES} return",
    )
    if resolved.facts.kind == "cpu":
        console.warn("optimizer.offload: host saves nothing on a CPU, whose memory is the host's; write offload: none")


def host_bytes(resolved: Resolved, trained: int, rank_info: RankInfo) -> int:
    """Bytes of one machine's memory that its processes take for the states of so many trained parameters.

    Norms, which no tensor group splits, count as if they were split.
    """
    local, parts = rank_info.local_world_size, weight_parts(resolved.recipe.parallel, rank_info)
    of_process = -(-trained // parts)
    return local * (STATE_BYTES * of_process + buffer_bytes(of_process))
