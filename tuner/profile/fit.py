"""Settings of a recipe that fit into a memory, the fastest first, at the global batch that it has.

What `tuner profile --fit` found is kept in the cache for when the same is asked again.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuner.config.load import recipe_dict
from tuner.config.recipe import Recipe
from tuner.data.encoding.tokenizer_files import local_directory
from tuner.errors import MemoryLimitError, RecipeError, TunerError
from tuner.profile import search
from tuner.profile.predict import Target
from tuner.profile.workload import prepared_for
from tuner.runtime.dist import RankInfo
from tuner.runtime.environment import versions
from tuner.runtime.files import gib, hash_of, keep_json, read_json
from tuner.setup.proven import source_hash
from tuner.setup.settled import AXES, LEVEL, MICRO, OFFLOAD, SHARD, TILED, changed, value_of
from tuner.stages import cache_root

SHOWN = 4
SMALLEST_ROW = 256
Way = tuple[dict[str, Any], search.Tradeoff]
"""Rows of another length, as values by key, and a tradeoff of what changes results."""


@dataclass
class Fit:
    """What fits, the fastest first, and how it was found."""

    choices: list[search.Choice]
    """At least one; where predictions are unverified and nothing fits by them, the one that comes closest."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Keys of the choices that change results, and how."""
    last_resort: bool = False
    predictions: int = 0
    """How many were made to find it."""

    def warnings(self) -> list[str]:
        """What of the choices changes results, each in a sentence."""
        resort = ["as a last resort: nothing fits that trains the weights themselves"] if self.last_resort else []
        return [*resort, *(f"{key} changes results: {words}" for key, words in self.changes.items())]

    def as_json(self) -> dict[str, Any]:
        """How it was found, as plain values."""
        return {"changes_results": dict(self.changes), "last_resort": self.last_resort, "predictions": self.predictions}


def fit(recipe: Recipe, target: Target, notify: Callable[[str], None] = lambda line: None) -> Fit:
    """Find the fastest combination that fits of rows, recomputing, sharding and all other memory options.

    What changes results is tried in the order of `ways_of`. Raises MemoryLimitError, naming what comes closest, where
    nothing fits and predictions are verified.
    """
    tried: list[search.Trials] = []
    refused: list[RecipeError] = []
    off = {key: False for key in (TILED, OFFLOAD) if value_of(recipe, key) == "auto"}  # where that fits, as `auto` is
    for changes, tradeoff in ways_of(recipe):
        always = {**changes, **tradeoff.values}
        try:
            trials = search.Trials(tradeoff.of(changed(recipe, {**changes, **off})), target, None, always, notify)
            tree = _tree(trials)
            fastest = tree.fastest()
        except RecipeError as error:  # of what changes results: the model cannot be trained so
            notify(f"{search.described(always)}: {error.message}")
            refused.append(error)
            continue
        tried.append(trials)
        if fastest is not None:
            return _of(tried, trials.fitting(), tradeoff)
    if not tried:
        raise refused[0]
    if not any(trials.tried for trials in tried):
        tried[-1].choice(tree.leanest())
    every = [choice for trials in tried for choice in trials.tried]
    closest = min(every, key=lambda choice: choice.prediction.peak_bytes)
    if not closest.prediction.verified:
        return _of(tried, [closest], search.Tradeoff())
    raise MemoryLimitError(
        f"nothing fits in {gib(target.limit_bytes)}: {search.described(closest.overrides)} comes closest, "
        f"with a predicted peak of {gib(closest.prediction.peak_bytes)}",
        hint="take more processes, or a smaller model",
    )


def ways_of(recipe: Recipe) -> Iterator[Way]:
    """What changes results is tried after what does not.

    Rows that are half as long, twice as many to a step, only where nothing else fits; an adapter in the place of the
    weights as a last resort.
    """
    tradeoffs = search.tradeoffs_of(recipe)
    for changes in _rows(recipe):
        yield from ((changes, tradeoff) for tradeoff in tradeoffs if not tradeoff.last_resort)
    yield from (({}, tradeoff) for tradeoff in tradeoffs if tradeoff.last_resort)


def _of(tried: list[search.Trials], choices: list[search.Choice], tradeoff: search.Tradeoff) -> Fit:
    return Fit(choices, tradeoff.changes, tradeoff.last_resort, sum(trials.count for trials in tried))


def _tree(trials: search.Trials) -> search.Tree:
    """All combinations of a recipe's rows, levels, ways of sharding and other options that change nothing."""
    recipe, target = trials.recipe, trials.target
    groups = _groups(trials.speed, recipe)
    each = [search.row_counts(changed(recipe, sizes), target) for sizes in groups] if recipe.data.packs_rows else [[1]]
    rows = sorted({count for counts in each for count in counts})
    options = search.memory_options(recipe, target.device.kind)
    dimensions = [  # what saves most time comes first: a branch is cut by the leanest of all that follow
        search.Dimension(tuple(groups), is_optional=True),
        search.Dimension(tuple({LEVEL: level} for level in reversed(search.LEVELS))),
        search.Dimension(tuple({MICRO: size} for size in rows)),
        *(search.Dimension(tuple({key: value} for value in each), is_optional=True) for key, each in options.items()),
        search.Dimension(tuple(_shardings(target.rank_info))),
    ]
    return search.Tree(dimensions, trials.speed.step_s, trials)


def _groups(speed: search.Speed, recipe: Recipe) -> list[dict[str, Any]]:
    """Sizes of the axes whose processes compute layers or rows together, from those that need the least memory on.

    The recipe's own, none, and each axis alone: what an axis saves of memory is found with the first sizes of each.
    """
    keys = [f"parallel.{axis}" for axis in AXES]
    alone = dict.fromkeys(keys, 1)
    found = [{key: value_of(recipe, key) for key in keys}, alone]
    for axis, key in zip(AXES, keys, strict=True):
        found += [{**alone, key: size} for size in speed.group_sizes(axis) if size > 1]
    possible = [sizes for number, sizes in enumerate(found) if sizes not in found[:number]]
    possible = [sizes for sizes in possible if speed.has_room_for_groups({**sizes, SHARD: "full"})]
    return sorted(possible, key=_leanest_first)


def _leanest_first(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Rows that are cut leave least of the activations to each process, then layers that are split, then experts."""
    tensor, sequence, expert = (sizes[f"parallel.{axis}"] for axis in AXES)
    return -sequence * tensor, -sequence, -expert


def _rows(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The recipe's rows, then shorter ones, where they are packed and their length is written down."""
    yield {}
    length, count = recipe.data.max_length, recipe.train.global_batch_size
    while isinstance(length, int) and recipe.data.packs_rows and length % 2 == 0 and length // 2 >= SMALLEST_ROW:
        length, count = length // 2, count * 2
        yield {"data.max_length": length, "train.global_batch_size": count}


def _shardings(rank_info: RankInfo) -> list[dict[str, Any]]:
    """Ways of sharding, from the one that needs the least memory on."""
    if rank_info.world_size == 1:
        return [{}]
    kinds = ("full", "hybrid") if rank_info.world_size > rank_info.local_world_size else ("full",)
    regathered = [{SHARD: kind, "parallel.reshard_after_forward": True} for kind in kinds]
    return [*regathered, {SHARD: "full", "parallel.reshard_after_forward": False}, {SHARD: "none"}]


KEPT = "fits"
STEP_BYTES = 128 << 20
CODE = ("config", "model", "parallel", "profile", "setup", "train")
"""Parts of tuner by which it predicts."""


@dataclass(frozen=True)
class KeptAnswer:
    """All that the command says of what it found."""

    table: list[list[str]]
    flags: str
    metrics: dict[str, Any]
    warnings: list[str]
    overrides: dict[str, Any]
    predictions: int
    took_s: float


def key_of(recipe: Recipe, target: Target) -> str:
    """What an answer depends on, in short: recipe, the model's config, prepared rows, target, libraries and tuner."""
    found = prepared_for(recipe, None)
    directory = local_directory(recipe.model.name_or_path)
    config = None if directory is None else directory / "config.json"
    # Memory in whole pieces, so that what is free now and then is the same.
    limits = [None if size is None else size // STEP_BYTES for size in (target.limit_bytes, target.host_limit_bytes)]
    facts = {
        "recipe": {**recipe_dict(recipe), "name": None, "output_dir": None},
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config is not None and config.is_file() else None,
        "data": None if found is None else found[0].key,
        "target": [target.device.shown, asdict(target.rank_info), *limits],
        "versions": versions(),
        "code": source_hash(CODE),
    }
    return hash_of(facts, 16)


def known(key: str, recipe: Recipe) -> KeptAnswer | None:
    """The answer that was kept."""
    with suppress(TunerError, OSError, TypeError):
        return KeptAnswer(**read_json(_path(key, recipe)))
    return None


def keep(key: str, recipe: Recipe, answer: KeptAnswer) -> None:
    """Keep an answer, where the cache can be written."""
    keep_json(_path(key, recipe), asdict(answer))


def _path(key: str, recipe: Recipe) -> Path:
    root = cache_root() if recipe.data.cache_dir is None else Path(recipe.data.cache_dir)
    return root / KEPT / f"{key}.json"
