"""What of a recipe is settled before it is resolved: the `auto` of memory and speed, and a default that cannot divide.

Five keys may be left to a prediction, which is made once for all processes of a launch. Importing it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.config.load import LoadedRecipe
from tuner.config.recipe import ParallelSection, Recipe, TrainSection
from tuner.runtime.dist import RankInfo

MICRO, LEVEL, SHARD = "train.micro_batch_size", "train.gradient_checkpointing", "parallel.shard"
TILED, OFFLOAD = "train.tiled_mlp", "train.offload_activations"
BATCH = "train.global_batch_size"
AXES = ("tensor", "sequence", "expert")
"""Keys of `parallel` whose processes compute a layer or a row together, or have its experts between them."""
PREDICTED = (MICRO, LEVEL, SHARD, TILED, OFFLOAD)
"""Keys whose `auto` is settled by prediction on CUDA."""
WITHOUT_PREDICTION: Mapping[str, Any] = {MICRO: 1, LEVEL: "none", OFFLOAD: False, TILED: False}
"""What an `auto` of memory is where nothing is predicted."""


@dataclass(frozen=True)
class Settled:
    """Values by the recipe's dotted keys, and the reason for each."""

    values: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with these values."""
        return changed(recipe, self.values)

    def and_also(self, other: Settled) -> Settled:
        """Both; where both have a key, the other's."""
        return Settled({**self.values, **other.values}, {**self.reasons, **other.reasons})


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with these values, by their keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {section: getattr(recipe, section).model_copy(update=update) for section, update in sections.items()}
    return recipe.model_copy(update=updated)


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key of a section."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def data_processes(parallel: ParallelSection, processes: int) -> int:
    """Of so many processes, those that compute rows of their own: the others share the rows of one of them."""
    return max(1, processes // sharing(parallel))


def sharing(parallel: ParallelSection) -> int:
    """How many processes compute the same rows."""
    return parallel.tensor * parallel.sequence


def in_groups(parallel: ParallelSection, processes: int) -> str:
    """The processes of a launch in words, in groups where some share rows."""
    words = f"{processes} process{'es' if processes > 1 else ''}"
    there = data_processes(parallel, processes)
    return words if there == processes else f"{there} group{'s' if there > 1 else ''} of {processes // there} processes"


def left_open(recipe: Recipe, processes: int) -> tuple[str, ...]:
    """The keys that are left to a prediction; a single process has nothing to shard."""
    return tuple(key for key in PREDICTED if value_of(recipe, key) == "auto" and (key != SHARD or processes > 1))


def ways_to_shard(recipe: Recipe, rank_info: RankInfo) -> tuple[str, ...]:
    """Values of parallel.shard in the order in which they are wanted: the one with the least to send first."""
    if recipe.parallel.shard != "auto":
        return (recipe.parallel.shard,)
    if recipe.parallel.replicas is not None:
        return ("hybrid",)
    is_whole = recipe.parallel.tensor == recipe.parallel.expert == 1
    adapted = is_whole and recipe.adapter.kind != "none" and rank_info.world_size > 1
    machines = rank_info.local_world_size > 1 and copy_on_each_machine(recipe, rank_info)
    return (*(["none"] if adapted else []), *(["hybrid"] if machines else []), "full")


def copy_on_each_machine(recipe: Recipe, rank_info: RankInfo) -> bool:
    """Whether there are several machines, each of which can hold a copy of the model in groups of its own."""
    local, parallel = rank_info.local_world_size, recipe.parallel
    group = parallel.tensor * max(parallel.sequence, parallel.expert)
    return rank_info.world_size > local and local % group == 0


def rows_at_once(train: TrainSection) -> int:
    """Rows of a micro-batch as far as they are known: one where they are left open."""
    rows = train.micro_batch_size
    return 1 if rows == "auto" else rows


def without_prediction(recipe: Recipe) -> Recipe:
    """The recipe with what an `auto` of memory is where nothing is predicted; sharding is left to its resolution."""
    return changed(recipe, {key: value for key, value in WITHOUT_PREDICTION.items() if value_of(recipe, key) == "auto"})


def whole_batches(loaded: LoadedRecipe, processes: int) -> Settled:
    """The default global batch made one that these processes divide; nothing of one that is written, or divides."""
    train, there = loaded.recipe.train, data_processes(loaded.recipe.parallel, processes)
    unit, rows = rows_at_once(loaded.recipe.train) * there, train.global_batch_size
    default = TrainSection.model_fields["global_batch_size"].default
    if BATCH in loaded.origins or rows != default or rows % unit == 0:
        return Settled()
    near = max(1, int(rows / unit + 0.5)) * unit
    groups = in_groups(loaded.recipe.parallel, processes)
    of = groups if unit == there else f"{groups} of {unit // there} rows"
    return Settled({BATCH: near}, {BATCH: f"the default of {rows} rows does not divide into {of}"})


def with_whole_batches(loaded: LoadedRecipe, processes: int) -> LoadedRecipe:
    """The recipe with a global batch that these processes divide, where it was not written."""
    return replace(loaded, recipe=whole_batches(loaded, processes).of(loaded.recipe))


def settled_in(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the launches of a run settled, by key; of each the newest value."""
    found: dict[str, Any] = {}
    for launch in () if record is None else record["launches"]:
        found |= meaningful(launch.get("settled"))
    return found


def meaningful(values: Any) -> dict[str, Any]:
    """Of values that were read from a file, those that can be settled."""
    kinds: dict[str, tuple[str, ...]] = {LEVEL: ("none", "selective", "full"), SHARD: ("none", "hybrid", "full")}
    given = values.items() if isinstance(values, Mapping) else ()
    return {
        key: value
        for key, value in given
        if value in kinds.get(key, ())
        or (key in {MICRO, BATCH} and type(value) is int and value > 0)
        or (key in {TILED, OFFLOAD} and type(value) is bool)
    }


def with_batch_of(record: Mapping[str, Any] | None, loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the global batch that its run has, where the default was not written and gave way to another."""
    rows = settled_in(record).get(BATCH)
    if rows is None or BATCH in loaded.origins:
        return loaded
    return replace(loaded, recipe=changed(loaded.recipe, {BATCH: rows}))


def reopened(record: Mapping[str, Any] | None, loaded: LoadedRecipe, processes: int) -> LoadedRecipe:
    """The recipe with the micro-batch left open that its run settled, where these processes do not divide it."""
    train, rows = loaded.recipe.train, settled_in(record).get(MICRO)
    there = data_processes(loaded.recipe.parallel, processes)
    if rows is None or train.micro_batch_size != rows or train.global_batch_size % (rows * there) == 0:
        return loaded
    return replace(loaded, recipe=changed(loaded.recipe, {MICRO: "auto"}))
