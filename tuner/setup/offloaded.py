"""What is said at the start of a run whose layers' inputs are kept on the host."""

from math import ceil

from tuner.model.offload import BLOCK
from tuner.runtime.files import gib
from tuner.setup.resolve import Resolved
from tuner.setup.settled import rows_at_once


def offload_line(resolved: Resolved) -> str:
    """Where the inputs of recomputed layers are kept, and how much of the host's memory they take at most."""
    where = f"the inputs of recomputed layers are kept on the host: up to {gib(host_bytes(resolved))} a process"
    return f"{where}, which saves nothing on a CPU" if resolved.facts.kind == "cpu" else where


def host_bytes(resolved: Resolved) -> int:
    """Bytes of one process's inputs on the host, in whole blocks: of each recomputed layer tokens times channels."""
    recipe, config = resolved.recipe, resolved.config.get_text_config()
    layers, there = recipe.train.gradient_checkpointing_layers, int(config.num_hidden_layers)
    count = ceil(layers.share * there) if layers.unit == "%" else int(layers.count)
    tokens = resolved.max_length * rows_at_once(recipe.train)
    each = tokens * int(config.hidden_size) * (4 if recipe.model.dtype == "fp32" else 2)
    return count * -(-each // BLOCK) * BLOCK
