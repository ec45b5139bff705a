"""What lowers the memory of a recipe: lines to write, none of which it has already."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tuner.config.recipe import Recipe
from tuner.errors import MemoryLimitError, is_out_of_memory, memory_line
from tuner.setup.resolve import Resolved
from tuner.setup.settled import rows_at_once

SHORTEST_ROW = 256
"""Tokens of a row below which none is proposed."""


def ways(recipe: Recipe, processes: int = 1) -> tuple[str, ...]:
    """Lines for a resolved recipe, those first that keep its global batch and what it trains."""
    train, found, rows = recipe.train, list[str](), rows_at_once(recipe.train)
    if rows > 1:
        fewer = max(size for size in range(1, rows) if rows % size == 0)
        found.append(f"train.micro_batch_size: {fewer}")
    if train.gradient_checkpointing != "full":
        found.append("train.gradient_checkpointing: full")
    elif str(train.gradient_checkpointing_layers) != "100%":
        found.append("train.gradient_checkpointing_layers: 100%")
    if processes > 1 and recipe.parallel.shard in {"none", "hybrid"}:
        found.append("parallel.shard: full")
    if isinstance(recipe.data.max_length, int) and recipe.data.max_length >= 2 * SHORTEST_ROW:
        found.append(f"data.max_length: {recipe.data.max_length // 2}")
    if recipe.adapter.kind == "none":
        found.append("adapter.kind: lora")
    elif recipe.model.quantize == "none":
        found.append("model.quantize: nf4")
    return tuple(found)


def less_memory(resolved: Resolved, processes: int = 1) -> str:
    """The hint for a resolved recipe that does not fit: what to write, the cheapest first."""
    lines = ways(resolved.recipe, processes)
    more = "take a device with more memory, or more processes"
    return f"write {', or '.join(lines)}; or {more}" if lines else more


@contextmanager
def memory_errors_as(made: Callable[[BaseException], MemoryLimitError]) -> Iterator[None]:
    """Turn a failed allocation of the block into what is made of it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise made(error) from error


def memory_errors(resolved: Resolved, processes: int) -> AbstractContextManager[None]:
    """Turn a failed allocation of the block into a MemoryLimitError that says what to write."""
    hint = less_memory(resolved, processes)
    return memory_errors_as(lambda error: MemoryLimitError(f"out of memory: {memory_line(error)}", hint=hint))
