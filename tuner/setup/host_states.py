"""What a recipe keeps in the host's memory, and whether there is room: optimizer states, shards, inputs of layers."""

from math import ceil

from tuner.config.optimizers import AdamwOptimizer, keeps_states_on_host
from tuner.errors import MemoryLimitError
from tuner.model.offload import BLOCK
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib
from tuner.runtime.memory import host_memory
from tuner.setup.less_memory import less_memory
from tuner.setup.resolve import Resolved
from tuner.setup.settled import rows_at_once
from tuner.setup.specs import trained_count, weight_parts
from tuner.train.host_adamw import DOWN_BYTES, STATE_BYTES, UP_BYTES, buffer_bytes


def announce_on_host(console: Console, resolved: Resolved, rank_info: RankInfo) -> None:
    """Say what a resolved recipe keeps in this machine's memory: the optimizer's states, or all of the shards.

    Raises MemoryLimitError where that takes more than is free.
    """
    trained = trained_count(resolved)
    if keeps_states_on_host(resolved.recipe.optimizer):
        whose = f"optimizer.offload: the states of {trained:,} parameters"
        room = _room(console, resolved, whose, host_bytes(resolved, trained, rank_info))
        moved = f"of each parameter {DOWN_BYTES} bytes come to the host in a step and {UP_BYTES} return"
        console.say("optimizer", f"states in {room}; {moved}")
        return
    whose = f"parallel.offload: shards of {resolved.n_parameters:,} parameters"
    room = _room(console, resolved, whose, shard_bytes(resolved, trained, rank_info))
    console.say("offload", f"weights, gradients and states in {room}; weights are brought to the device by layers")


def _room(console: Console, resolved: Resolved, whose: str, needed: int) -> str:
    """So many bytes of the host's memory, in words. Raises MemoryLimitError where they are not free."""
    free, key = host_memory()[1], whose.partition(":")[0]
    if needed > free:
        raise MemoryLimitError(
            f"{whose} take {gib(needed)} of the host's memory, of which {gib(free)} is free",
            hint="write offload: none on a device that holds them, or " + less_memory(resolved),
        )
    if resolved.facts.kind == "cpu":
        console.warn(f"{key}: host saves nothing on a CPU, whose memory is the host's; write offload: none")
    return f"{gib(needed)} of the host's memory, {gib(free)} free"


def shard_bytes(resolved: Resolved, trained: int, rank_info: RankInfo) -> int:
    """Bytes of one machine's memory that its processes take for shards: weights, and of so many trained parameters
    gradients and states, both in the type of the weights that are trained."""
    recipe, parts = resolved.recipe, weight_parts(resolved.recipe.parallel, rank_info)
    weight = 4 if recipe.model.dtype == "fp32" else 2
    own = 4 if recipe.adapter.kind != "none" else weight  # adapters are float32
    kept = 3 if isinstance(recipe.optimizer, AdamwOptimizer) else 2  # a gradient, and AdamW's moments or SGD's one
    return rank_info.local_world_size * -(-(resolved.n_parameters * weight + trained * own * kept) // parts)


def host_bytes(resolved: Resolved, trained: int, rank_info: RankInfo) -> int:
    """Bytes of one machine's memory that its processes take for the states of so many trained parameters.

    Norms, which no tensor group splits, count as if they were split.
    """
    local, parts = rank_info.local_world_size, weight_parts(resolved.recipe.parallel, rank_info)
    of_process = -(-trained // parts)
    return local * (STATE_BYTES * of_process + buffer_bytes(of_process))


def offload_line(resolved: Resolved) -> str:
    """Where the inputs of recomputed layers are kept, and how much of the host's memory they take at most."""
    where = f"the inputs of recomputed layers are kept on the host: up to {gib(inputs_bytes(resolved))} a process"
    return f"{where}, which saves nothing on a CPU" if resolved.facts.kind == "cpu" else where


def inputs_bytes(resolved: Resolved) -> int:
    """Bytes of one process's inputs on the host, in whole blocks: of each recomputed layer tokens times channels."""
    recipe, config = resolved.recipe, resolved.config.get_text_config()
    layers, there = recipe.train.gradient_checkpointing_layers, int(config.num_hidden_layers)
    count = ceil(layers.share * there) if layers.unit == "%" else int(layers.count)
    tokens = resolved.max_length * rows_at_once(recipe.train)
    each = tokens * int(config.hidden_size) * (4 if recipe.model.dtype == "fp32" else 2)
    return count * -(-each // BLOCK) * BLOCK
