"""Settings of a recipe that fit into a memory, the fastest first, at the global batch that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import MemoryLimitError
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib

LEVELS = ("none", "selective", "full")
SHOWN = 4
SMALLEST_ROW = 256


@dataclass(frozen=True)
class Choice:
    """A setting that was tried: the keys in which it differs from the recipe, and what is predicted for it."""

    overrides: dict[str, Any]
    prediction: Prediction

    @property
    def fits(self) -> bool:
        """Whether it fits, the stated error allowed for."""
        return self.prediction.verdict == "fits"

    @property
    def step_s(self) -> float:
        """Estimated seconds a step."""
        return self.prediction.time.step_s


def fit(recipe: Recipe, target: Target, notify: Callable[[str], None] = lambda line: None) -> list[Choice]:
    """What fits, the fastest first; there is at least one.

    Where predictions are unverified and nothing fits by them, it is what comes closest. Tried are micro-batch sizes,
    levels of recomputing and ways of sharding, shorter rows only where nothing else fits.

    Rows that are half as long come with twice as many of them to a step, so that its tokens stay. For each way of
    sharding and level the largest micro-batch is searched, from the smallest one on: memory grows with it. Raises
    MemoryLimitError, naming what comes closest, where nothing fits and predictions are verified.
    """
    tried: list[Choice] = []
    for changes in _rows(recipe, target):
        for choice in _search(recipe, target, changes):
            tried.append(choice)
            notify(f"{_described(choice.overrides)}: {gib(choice.prediction.peak_bytes)}, {choice.prediction.verdict}")
        found = [choice for choice in tried if choice.fits]
        if found:
            return sorted(found, key=lambda choice: (choice.step_s, len(choice.overrides)))
    closest = min(tried, key=lambda choice: choice.prediction.peak_bytes)
    if not closest.prediction.verified:
        return [closest]
    raise MemoryLimitError(
        f"nothing fits in {gib(target.limit_bytes)}: {_described(closest.overrides)} comes closest, "
        f"with a predicted peak of {gib(closest.prediction.peak_bytes)}",
        hint="train an adapter (--adapter.kind lora), take more processes, or a smaller model",
    )


def _search(recipe: Recipe, target: Target, changes: dict[str, Any]) -> Iterator[Choice]:
    """Choices worth a look: what is computed again costs time, and pays where it lets a larger micro-batch fit."""
    rows = changes.get("train.global_batch_size", recipe.train.global_batch_size)
    for sharding in _shardings(target.rank_info):
        largest = 0
        for level in LEVELS:
            for size in (size for size in _micro_batches(rows, target) if size > largest):
                values = {"train.micro_batch_size": size, "train.gradient_checkpointing": level, **sharding, **changes}
                choice = Choice(_overrides(recipe, values), predict(changed(recipe, values), target))
                yield choice
                if not choice.fits:
                    break
                largest = size


def changed(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe with these values, by their keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {section: getattr(recipe, section).model_copy(update=update) for section, update in sections.items()}
    return recipe.model_copy(update=updated)


def _rows(recipe: Recipe, target: Target) -> Iterator[dict[str, Any]]:
    """The recipe's rows, then shorter ones, where they are packed and their length is written down."""
    yield {}
    length, count = recipe.data.max_length, recipe.train.global_batch_size
    while isinstance(length, int) and recipe.data.packing and length % 2 == 0 and length // 2 >= SMALLEST_ROW:
        length, count = length // 2, count * 2
        yield {"data.max_length": length, "train.global_batch_size": count}


def _micro_batches(global_batch_size: int, target: Target) -> Iterator[int]:
    """Numbers of rows into which the global batch divides evenly on all processes."""
    each = global_batch_size // target.rank_info.world_size
    return (size for size in range(1, each + 1) if each % size == 0)


def _shardings(rank_info: RankInfo) -> list[dict[str, Any]]:
    if rank_info.world_size == 1:
        return [{}]
    kinds: list[dict[str, Any]] = [
        {"parallel.shard": "full", "parallel.reshard_after_forward": value} for value in (True, False)
    ]
    if rank_info.world_size > rank_info.local_world_size:
        kinds.append({"parallel.shard": "hybrid", "parallel.reshard_after_forward": True})
    return [*kinds, {"parallel.shard": "none"}]


def _overrides(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """Those values in which the recipe differs."""
    return {key: value for key, value in values.items() if attrgetter(key)(recipe) != value}


def _described(overrides: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in overrides.items()) or "the recipe as it is"
