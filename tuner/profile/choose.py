"""What becomes of an `auto` of memory on a device: as little recomputed, and as many rows at once, as fit and pay.

Ways of sharding are tried from the one with the least to send on; the first with which anything fits is chosen. More is
recomputed where nothing fits with less, or where the rows that then fit save a twentieth of the estimated step. A
micro-batch has the highest rate of those that fit: up to the size from which on twice the rows save less than a
hundredth. Tiles of the MLP, then activations on the host, are taken only where without them nothing fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.profile.search import LEVELS, Choice, Trials, lines_to_write, refusal, row_counts
from tuner.runtime.files import gib
from tuner.setup import settled as settling
from tuner.setup.settled import LEVEL, MICRO, OFFLOAD, SHARD, TILED, Settled

LESS = 0.9
"""Of the predicted peak of a setting that did not fit: what another one may need at most, whatever was predicted."""


def choose(recipe: Recipe, target: Target, prepared: Path | None = None) -> tuple[Settled, Prediction]:
    """Settle what a recipe leaves open, for a CUDA device, and what is predicted with that.

    ``prepared`` is the directory of its data, where that is known. Where nothing fits, what needs least is chosen, and
    the reasons say so. Raises what predicting raises where not even the plainest variant can be predicted.
    """
    open_keys, trials = settling.left_open(recipe, target.rank_info.world_size), Trials(recipe, target, prepared)
    refused = list[Exception]()
    best = next((found for others in _ways(trials) if (found := _fastest(trials, others, refused))), None)
    if not trials.predicted:
        raise refused[0]
    found = best or min(trials.predicted, key=lambda choice: choice.prediction.peak_bytes)
    settled = settling.changed(recipe, found.overrides)
    reasons = _reasons(trials, found)
    if MICRO in reasons and found.fits:
        reasons[MICRO] = f"{trials.speed.rows(settled)}: {reasons[MICRO]}"
    return Settled({key: settling.value_of(settled, key) for key in open_keys}, reasons), found.prediction


def _ways(trials: Trials) -> Iterator[dict[str, Any]]:
    """Ways of sharding, then the leanest of them with what is left open of tiles and offload, the cheaper first."""
    recipe, rank_info = trials.recipe, trials.target.rank_info
    open_keys = [key for key in (TILED, OFFLOAD) if settling.value_of(recipe, key) == "auto"]
    without = dict.fromkeys(open_keys, False)
    sharding: dict[str, Any] = {}
    kinds = settling.ways_to_shard(recipe, rank_info)
    for kind in kinds:
        if kind != kinds[-1] and trials.too_large({SHARD: kind}):  # the weights and their state alone
            continue
        sharding = {} if rank_info.world_size == 1 else {SHARD: kind}
        yield {**sharding, **without}
    for key in open_keys:
        yield {**sharding, **without, key: True}
    if len(open_keys) > 1:
        yield {**sharding, **dict.fromkeys(open_keys, True)}


def _fastest(trials: Trials, others: Mapping[str, Any], refused: list[Exception]) -> Choice | None:
    """The fastest of levels and rows that fit with these other values; None where none does.

    With tiles or offload only the leanest level is looked at: without them not even that has fitted.
    """
    recipe, speed, best = trials.recipe, trials.speed, None
    levels = LEVELS if recipe.train.gradient_checkpointing == "auto" else (recipe.train.gradient_checkpointing,)
    sizes = _sizes(recipe, trials.target)
    for level in levels[-1:] if True in others.values() else levels:
        values = {LEVEL: level, **others}
        if refusal(settling.changed(recipe, values)) is not None:
            continue
        worth = speed.worth(values, sizes, best)
        try:
            roomy = 2 * speed.state_bytes(others) <= trials.target.limit_bytes
            best = trials.largest(values, worth, roomy) or best
        except Exception as error:  # noqa: BLE001 - of one level: another one may do
            refused.append(error)
    return best


def _sizes(recipe: Recipe, target: Target) -> list[int]:
    """Rows that are tried; documents that are not packed stay alone, for models that cannot keep them apart."""
    rows = recipe.train.micro_batch_size
    if rows != "auto":
        return [rows]
    return row_counts(recipe, target) if recipe.data.packs_rows else [1]


def _reasons(trials: Trials, found: Choice) -> dict[str, str]:
    """Why each key that was left open has its value, in words."""
    recipe, target, tried = trials.recipe, trials.target, trials.predicted
    open_keys, prediction = settling.left_open(recipe, target.rank_info.world_size), found.prediction
    peak, limit = gib(prediction.peak_bytes), gib(prediction.limit_bytes)
    if not found.fits:
        least = f"least memory: nothing is predicted to fit in {limit}; this peaks at {peak}"
        lines = lines_to_write(recipe)
        return dict.fromkeys(open_keys, f"{least}; less is needed with {lines[0]}" if lines else least)
    settled = settling.changed(recipe, found.overrides)
    reasons = dict.fromkeys(open_keys, f"predicted peak {peak} of {limit}")
    if LEVEL in reasons:
        reasons[LEVEL] = _why_level(settled, tried, found)
    if SHARD in reasons:
        reasons[SHARD] = _why_shard(settled, tried, found, settling.ways_to_shard(recipe, target.rank_info))
    for key in (key for key in (TILED, OFFLOAD) if key in reasons):
        reasons[key] = _why_more(key, settled, tried, found)
    return reasons


def _why_more(key: str, settled: Recipe, tried: list[Choice], found: Choice) -> str:
    """Why activations are, or are not, tiled or kept on the host."""
    if not settling.value_of(settled, key):
        return "it fits without"
    less = min((choice.prediction for choice in tried if not choice.overrides.get(key)), key=lambda p: p.peak_bytes)
    return f"without it at least {gib(less.peak_bytes)} are predicted: too much for {gib(found.prediction.limit_bytes)}"


def _why_level(settled: Recipe, tried: list[Choice], found: Choice) -> str:
    level, limit = settled.train.gradient_checkpointing, gib(found.prediction.limit_bytes)
    if level == "none":
        return f"it fits without: predicted peak {gib(found.prediction.peak_bytes)} of {limit}"
    sharding, more = found.overrides.get(SHARD), [key for key in (TILED, OFFLOAD) if found.overrides.get(key)]
    less = [choice for choice in tried if choice.overrides.get(SHARD) == sharding]
    by_level: dict[str, Choice] = {}
    for choice in sorted(less, key=lambda choice: choice.prediction.peak_bytes):
        by_level.setdefault(str(choice.overrides.get(LEVEL, "none")), choice)
    before = [name for name in LEVELS[: LEVELS.index(level)] if name in by_level]
    over = [f"{name} {gib(by_level[name].prediction.peak_bytes)}" for name in before if not by_level[name].fits]
    if not more and (len(over) < len(before) or not over):
        return "estimated to be faster with the rows that then fit"
    return f"predicted peak with {', with '.join(over)}: too much for {limit}"


def _why_shard(settled: Recipe, tried: list[Choice], found: Choice, wanted: Sequence[str]) -> str:
    """Why weights are sharded as they are."""
    kind, limit = settled.parallel.shard, gib(found.prediction.limit_bytes)
    if kind == "none":
        return f"the whole model fits on each device: predicted peak {gib(found.prediction.peak_bytes)} of {limit}"
    others = [choice for choice in tried if choice.overrides.get(SHARD) not in {None, kind}]
    if not others and len(wanted) > 1 and kind == wanted[-1]:
        return f"of {wanted[-2]} the weights and their state alone are too much for {limit}"
    if others:
        least = min(others, key=lambda choice: choice.prediction.peak_bytes)
        return f"{least.overrides[SHARD]} needs at least {gib(least.prediction.peak_bytes)}: too much for {limit}"
    return "a copy for each machine fits, and less is sent between machines" if kind == "hybrid" else "one machine"


def predict_settled(loaded: LoadedRecipe, target: Target) -> tuple[Settled, Prediction]:
    """What a launch on the target would settle of a recipe, and what is predicted with that.

    For a CPU nothing is settled by prediction. Raises as `predict` does.
    """
    processes = target.rank_info.world_size
    settled = settling.whole_batches(loaded, processes)
    recipe = settled.of(loaded.recipe)
    if target.device.kind == "cuda" and settling.left_open(recipe, processes):
        with suppress(Exception):  # predicting the recipe as it is says why
            further, _ = choose(recipe, target)
            return settled.and_also(further), predict(further.of(recipe), target)
    return settled, predict(recipe, target)


def choose_less(recipe: Recipe, target: Target, prepared: Path) -> tuple[dict[str, Any], Prediction] | None:
    """Fewer rows, or more recomputed, with which a resolved recipe fits that did not, and what is predicted with them.

    Where that is not enough, also with tiles, and with inputs of layers on the host. Values are those in which it
    differs; None where nothing that needs less is predicted to fit.
    """
    now = predict(recipe, target, prepared)
    limit = min(target.limit_bytes, int(LESS * now.peak_bytes))
    trials = Trials(recipe, replace(target, limit_bytes=limit), prepared)
    rows, level = settling.rows_at_once(recipe.train), recipe.train.gradient_checkpointing
    fewer = [size for size in range(1, rows) if rows % size == 0]
    options: list[dict[str, Any]] = [{LEVEL: each} for each in LEVELS[LEVELS.index(level) :]]
    options.append({LEVEL: LEVELS[-1], TILED: True})
    if target.device.kind == "cuda":  # a CPU has no memory but the host's
        options += [{LEVEL: LEVELS[-1], OFFLOAD: True}, {LEVEL: LEVELS[-1], TILED: True, OFFLOAD: True}]
    for values in options:
        if refusal(settling.changed(recipe, values)) is not None:
            continue
        try:
            found = trials.largest(values, fewer if values == {LEVEL: level} else [*fewer, rows])
        except RecipeError:  # the model cannot be tiled
            continue
        if found is not None:
            return found.overrides, found.prediction
    return None
