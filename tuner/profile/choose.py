"""What becomes of an `auto` of memory on a device: as little recomputed, and as many rows at once, as fit and pay.

Ways of sharding are tried from the one with the least to send on; the first with which anything fits is taken. More is
recomputed where nothing fits with less, or where the rows that then fit save a twentieth of the estimated step. A
micro-batch is the largest that fits, up to the size from which on twice the rows save less than a twentieth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe
from tuner.config.optimizers import AdamwOptimizer, keeps_states_on_host
from tuner.config.recipe import Recipe
from tuner.model.flops import Flops, training_flops
from tuner.profile.estimate import computing
from tuner.profile.predict import Target, predict, resolved_for
from tuner.profile.prediction import Prediction
from tuner.profile.search import LEVELS, Choice, Search, row_counts
from tuner.profile.workload import workload
from tuner.runtime.files import gib
from tuner.setup.build import meta_model_of, trainable_of
from tuner.setup.resolve import Resolved
from tuner.setup.settled import (
    LEVEL,
    MICRO,
    SHARD,
    Settled,
    changed,
    left_open,
    rows_at_once,
    value_of,
    ways_to_shard,
    whole_batches,
)

PAYS = 0.95
"""What the estimated time of a step must come down to for the memory, or the arithmetic, that it costs."""
LESS = 0.9
"""Of the predicted peak of a setting that did not fit: what another one may need at most, whatever was predicted."""


def choose(recipe: Recipe, target: Target, prepared: Path | None = None) -> tuple[Settled, Prediction]:
    """Settle what a recipe leaves open, for a CUDA device, and what is predicted with that.

    ``prepared`` is the directory of its data, where that is known. Where nothing fits, what needs least is taken, and
    the reasons say so. Raises what predicting raises where not even the plainest variant can be predicted.
    """
    open_keys = left_open(recipe, target.rank_info.world_size)
    search, speed = Search(recipe, target, prepared), _Speed(recipe, target, prepared)
    sizes, refused = _sizes(recipe, target), list[Exception]()
    best: Choice | None = None
    for kind in _possible(ways_to_shard(recipe, target.rank_info), speed, target):
        sharding = {} if target.rank_info.world_size == 1 else {SHARD: kind}
        for level in _levels(recipe):
            values = {LEVEL: level, **sharding}
            worth = speed.worth(values, sizes, best)
            try:
                best = search.largest(values, worth) or best
            except Exception as error:  # noqa: BLE001 - of one level: another one may do
                refused.append(error)
        if best is not None:
            break
    if not search.tried:
        raise refused[0]
    found = best or min(search.tried, key=lambda choice: choice.prediction.peak_bytes)
    settled = changed(recipe, found.overrides)
    wanted = ways_to_shard(recipe, target.rank_info)
    reasons = {key: _reason(key, settled, search.tried, found, wanted) for key in open_keys}
    if MICRO in reasons and found.fits:
        reasons[MICRO] = f"{speed.rows(settled)}: {reasons[MICRO]}"
    return Settled({key: value_of(settled, key) for key in open_keys}, reasons), found.prediction


def _possible(kinds: Sequence[str], speed: _Speed, target: Target) -> list[str]:
    """Ways of sharding without those whose weights and their state alone are too much; the last one stays."""
    return [kind for kind in kinds if kind == kinds[-1] or speed.state_bytes(kind) <= target.limit_bytes]


class _Speed:
    """Estimates of steps, for which nothing is traced."""

    def __init__(self, recipe: Recipe, target: Target, prepared: Path | None) -> None:
        self._target = target
        self._resolved, _ = resolved_for(recipe, target)
        self._work = workload(recipe, self._resolved, target.rank_info, prepared)
        self._flops = _flops_of(self._resolved)

    def worth(self, values: Mapping[str, Any], sizes: Sequence[int], best: Choice | None) -> list[int]:
        """Rows that are worth their memory, and with such values the arithmetic of recomputing next to the best so far.

        Each is held against half of it, or against the next smaller one where that is less; after the first that does
        not pay, none does.
        """
        paying, before = [*sizes[:1]], sizes[0]
        for size in sizes[1:]:
            if self._step_s({**values, MICRO: size}) > PAYS * self._step_s({**values, MICRO: min(size / 2, before)}):
                break
            paying.append(size)
            before = size
        at_most = float("inf") if best is None else PAYS * self._step_s(best.overrides)
        return [size for size in paying if self._step_s({**values, MICRO: size}) <= at_most]

    def state_bytes(self, kind: str) -> int:
        """The least that the weights and their moments take of each process with a way of sharding."""
        recipe, ranks = self._resolved.recipe, self._target.rank_info
        shards = {"none": 1, "hybrid": ranks.local_world_size}.get(kind, ranks.world_size)
        if recipe.adapter.kind != "none" or recipe.model.freeze:
            each = 2
        else:
            weights = 2 if recipe.model.dtype == "bf16" else 4
            each = weights + _moment_bytes(recipe)
        return self._resolved.n_parameters * each // shards

    def rows(self, settled: Recipe) -> str:
        """The rows of a micro-batch in words."""
        rows, length = rows_at_once(settled), int(self._resolved.recipe.data.max_length)
        if not settled.data.packs_rows:
            return "documents that are not packed stay alone"
        return f"{rows} row{'' if rows == 1 else 's'} of {length:,} tokens at a time"

    def _step_s(self, values: Mapping[str, Any]) -> float:
        recipe, target = changed(self._resolved.recipe, values), self._target
        return computing(recipe, self._flops, target.device, target.rank_info, self._work).seconds


def _moment_bytes(recipe: Recipe) -> int:
    """The least that a weight's moments take of the device: of adamw two, in float32 or 8 bits, or on the host."""
    optimizer = recipe.optimizer
    if not isinstance(optimizer, AdamwOptimizer) or keeps_states_on_host(optimizer):
        return 0
    return 2 if optimizer.state == "8bit" else 8


def _levels(recipe: Recipe) -> tuple[str, ...]:
    level = recipe.train.gradient_checkpointing
    return LEVELS if level == "auto" else (level,)


def _sizes(recipe: Recipe, target: Target) -> list[int]:
    """Rows that are tried; documents that are not packed stay alone, for models that cannot keep them apart."""
    rows = recipe.train.micro_batch_size
    if rows != "auto":
        return [rows]
    return row_counts(recipe.train.global_batch_size, target) if recipe.data.packs_rows else [1]


def _flops_of(resolved: Resolved) -> Flops:
    """The arithmetic of the model as the recipe trains it."""
    model = meta_model_of(resolved)
    trainable_of(resolved.recipe, resolved.new_ids).apply(model, resolved.recipe.seed)
    return training_flops(model)


def _reason(key: str, settled: Recipe, tried: list[Choice], found: Choice, wanted: Sequence[str]) -> str:
    """Why a key has its value, in words."""
    peak, limit = gib(found.prediction.peak_bytes), gib(found.prediction.limit_bytes)
    if not found.fits:
        return f"least memory: nothing is predicted to fit in {limit}; this peaks at {peak}"
    if key == LEVEL:
        return _why_level(settled, tried, found)
    if key == SHARD:
        return _why_shard(settled, tried, found, wanted)
    return f"predicted peak {peak} of {limit}"


def _why_level(settled: Recipe, tried: list[Choice], found: Choice) -> str:
    level, sharding = settled.train.gradient_checkpointing, found.overrides.get(SHARD)
    limit = gib(found.prediction.limit_bytes)
    if level == "none":
        return f"it fits without: predicted peak {gib(found.prediction.peak_bytes)} of {limit}"
    less = [choice for choice in tried if choice.overrides.get(SHARD) == sharding]
    by_level: dict[str, Choice] = {}
    for choice in less:
        by_level.setdefault(str(choice.overrides.get(LEVEL, "none")), choice)
    before = [name for name in LEVELS[: LEVELS.index(level)] if name in by_level]
    over = [f"{name} {gib(by_level[name].prediction.peak_bytes)}" for name in before if not by_level[name].fits]
    if len(over) < len(before) or not over:
        return "estimated to be faster with the rows that then fit"
    return f"predicted peak with {', with '.join(over)}: too much for {limit}"


def _why_shard(settled: Recipe, tried: list[Choice], found: Choice, wanted: Sequence[str]) -> str:
    kind, limit = settled.parallel.shard, gib(found.prediction.limit_bytes)
    if kind == "none":
        return f"the whole model fits on each device: predicted peak {gib(found.prediction.peak_bytes)} of {limit}"
    others = [choice for choice in tried if choice.overrides.get(SHARD) not in {None, kind}]
    if not others and len(wanted) > 1 and kind == wanted[-1]:
        return f"of {wanted[-2]} the weights and their state alone are too much for {limit}"
    if others:
        least = min(others, key=lambda choice: choice.prediction.peak_bytes)
        return f"{least.overrides[SHARD]} needs at least {gib(least.prediction.peak_bytes)}: too much for {limit}"
    if kind == "hybrid":
        return "a copy for each machine fits, and less is sent between machines"
    return "one machine"


def predict_settled(loaded: LoadedRecipe, target: Target) -> tuple[Settled, Prediction]:
    """What a launch on the target would settle of a recipe, and what is predicted with that.

    For a CPU nothing is settled by prediction. Raises as `predict` does.
    """
    processes = target.rank_info.world_size
    settled = whole_batches(loaded, processes)
    recipe = settled.of(loaded.recipe)
    if target.device.kind == "cuda" and left_open(recipe, processes):
        with suppress(Exception):  # predicting the recipe as it is says why
            further, found = choose(recipe, target)
            return settled.and_also(further), found
    return settled, predict(recipe, target)


def choose_less(recipe: Recipe, target: Target, prepared: Path) -> tuple[dict[str, Any], Prediction] | None:
    """Fewer rows, or more recomputed, with which a resolved recipe fits that did not, and what is predicted with them.

    Values are those in which it differs; None where nothing that needs less is predicted to fit.
    """
    now = predict(recipe, target, prepared)
    limit = min(target.limit_bytes, int(LESS * now.peak_bytes))
    search, rows = Search(recipe, replace(target, limit_bytes=limit), prepared), rows_at_once(recipe)
    fewer = [size for size in range(1, rows) if rows % size == 0]
    for level in LEVELS[LEVELS.index(recipe.train.gradient_checkpointing) :]:
        sizes = fewer if level == recipe.train.gradient_checkpointing else [*fewer, rows]
        if (found := search.largest({LEVEL: level}, sizes)) is not None:
            return found.overrides, found.prediction
    return None
