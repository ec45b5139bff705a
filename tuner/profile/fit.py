"""Settings of a recipe that fit into a memory, the fastest first, at the global batch that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import MemoryLimitError
from tuner.profile.predict import Target
from tuner.profile.search import LEVELS, Choice, Search, Space, described, row_counts
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib

SHOWN = 4
SMALLEST_ROW = 256


def fit(recipe: Recipe, target: Target, notify: Callable[[str], None] = lambda line: None) -> list[Choice]:
    """What fits, the fastest first; there is at least one.

    Where predictions are unverified and nothing fits by them, it is what comes closest. Tried are micro-batch sizes,
    levels of recomputing and ways of sharding, shorter rows only where nothing else fits.

    Rows that are half as long come with twice as many of them to a step, so that its tokens stay. For each way of
    sharding and level the largest micro-batch is searched, from the smallest one on: memory grows with it. Raises
    MemoryLimitError, naming what comes closest, where nothing fits and predictions are verified.
    """
    search = Search(recipe, target)
    for changes in _rows(recipe):
        rows = changes.get("train.global_batch_size", recipe.train.global_batch_size)
        space = Space(_shardings(target.rank_info), LEVELS, row_counts(rows, target))
        for choice in search.walk(space, changes):
            notify(f"{described(choice.overrides)}: {gib(choice.prediction.peak_bytes)}, {choice.prediction.verdict}")
        found = [choice for choice in search.tried if choice.fits]
        if found:
            return sorted(found, key=lambda choice: (choice.step_s, len(choice.overrides)))
    adapter = "" if recipe.adapter.kind != "none" else ", or train an adapter (--adapter.kind lora)"
    closest = min(search.tried, key=lambda choice: choice.prediction.peak_bytes)
    if not closest.prediction.verified:
        return [closest]
    raise MemoryLimitError(
        f"nothing fits in {gib(target.limit_bytes)}: {described(closest.overrides)} comes closest, "
        f"with a predicted peak of {gib(closest.prediction.peak_bytes)}",
        hint=f"take more processes, or a smaller model{adapter}",
    )


def _rows(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The recipe's rows, then shorter ones, where they are packed and their length is written down."""
    yield {}
    length, count = recipe.data.max_length, recipe.train.global_batch_size
    while isinstance(length, int) and recipe.data.packs_rows and length % 2 == 0 and length // 2 >= SMALLEST_ROW:
        length, count = length // 2, count * 2
        yield {"data.max_length": length, "train.global_batch_size": count}


def _shardings(rank_info: RankInfo) -> list[dict[str, Any]]:
    if rank_info.world_size == 1:
        return [{}]
    kinds: list[dict[str, Any]] = [
        {"parallel.shard": "full", "parallel.reshard_after_forward": value} for value in (True, False)
    ]
    if rank_info.world_size > rank_info.local_world_size:
        kinds.append({"parallel.shard": "hybrid", "parallel.reshard_after_forward": True})
    return [*kinds, {"parallel.shard": "none"}]
