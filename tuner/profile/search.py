"""One search over the memory options of a recipe on a target: its variants are tried by prediction, each at most once.

Memory grows with the rows of a micro-batch and shrinks with what is recomputed: where some rows do not fit, more are
not tried. Where a model's layers are alike, variants are predicted from two shorter models. What is left `auto` is
settled by `choose` with :meth:`Trials.largest`; the fastest combination of all options is found by :class:`Tree`.
Options apart from rows, recomputing and sharding say what is written for each, and what it changes.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from tuner.config.optimizers import AdamwOptimizer
from tuner.config.recipe import LoraAdapter, Recipe
from tuner.config.rules import RULES
from tuner.errors import RecipeError, TunerError
from tuner.model.flops import training_flops
from tuner.profile.estimate import Sizes, StepSetting, computing, least_exchanged, seconds_of
from tuner.profile.predict import Target, layers_alike, predict, predict_by_layers, resolved_for
from tuner.profile.prediction import Prediction
from tuner.profile.workload import workload
from tuner.runtime.files import gib
from tuner.setup.axes import check_axes, possible_sizes
from tuner.setup.settled import MICRO, OFFLOAD, TILED, changed, data_processes, rows_at_once, value_of
from tuner.setup.specs import StepSections, assembly_spec, mesh_of, meta_model_of, step_sections, weight_parts

Values = Mapping[str, Any]
LEVELS = ("none", "selective", "full")
PAYS = 0.95
"""What the estimated time of a step must come down to for the arithmetic of recomputing."""
ROWS_PAY = 0.99
"""The same for twice the rows at once, which cost memory alone, and that is free once they fit."""
BYTES = {"fp32": 4, "bf16": 2}


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

    @property
    def lacks_host(self) -> bool:
        """Whether the device has room, and only the host's memory is too small."""
        return not self.prediction.host_fits and replace(self.prediction, host_limit_bytes=None).verdict == "fits"


class Speed:
    """Seconds of a step by the values that a recipe is given, and the least that its state takes."""

    def __init__(self, recipe: Recipe, target: Target, prepared: Path | None = None) -> None:
        self._target = target
        self._resolved, _ = resolved_for(recipe, target)
        work = workload(recipe, self._resolved, target.rank_info, prepared)
        self._place = StepSetting(target.device, target.rank_info, work)
        model = meta_model_of(self._resolved)
        self.layers = layers_alike(model)
        """Decoder layers, where all are alike; else 0."""
        assembly_spec(self._resolved).trainable.apply(model, recipe.seed)
        self._model, self._flops, self._sizes = model, training_flops(model), Sizes.of(model)

    def busy_s(self, values: Mapping[str, Any]) -> float:
        """Seconds of a step with these values, without what is sent between processes."""
        return computing(step_sections(self._resolved, values), self._flops, self._sizes, self._place).seconds

    def step_s(self, values: Mapping[str, Any]) -> float:
        """The least seconds of a step with these values: without the traffic of weights."""
        exchanged = least_exchanged(step_sections(self._resolved, values), self._resolved.config, self._place)
        return seconds_of(self.busy_s(values), exchanged)

    def has_room_for_groups(self, values: Mapping[str, Any]) -> bool:
        """Whether the model and the processes divide into the groups of these values."""
        parallel = step_sections(self._resolved, values).parallel
        try:
            check_axes(self._model, parallel)
            mesh_of(parallel, self._target.rank_info)
        except TunerError:
            return False
        return True

    def group_sizes(self, axis: str) -> tuple[int, ...]:
        """The sizes of an axis that the model can have inside a machine."""
        local = self._target.rank_info.local_world_size
        return tuple(size for size in possible_sizes(axis, self._resolved.config) if local % size == 0)

    def worth(self, values: Mapping[str, Any], sizes: Sequence[int], best: Choice | None) -> list[int]:
        """Rows that are worth their memory, and with such values the arithmetic of recomputing next to the best so far.

        Each is held against half of it, or against the next smaller one where that is less; after the first that does
        not pay, none does.
        """
        paying, before = [*sizes[:1]], sizes[0]
        for size in sizes[1:]:
            if self.step_s({**values, MICRO: size}) > ROWS_PAY * self.step_s({**values, MICRO: min(size / 2, before)}):
                break
            paying.append(size)
            before = size
        at_most = float("inf") if best is None else PAYS * self.step_s(best.overrides)
        return [size for size in paying if self.step_s({**values, MICRO: size}) <= at_most]

    def state_bytes(self, values: Mapping[str, Any]) -> float:
        """The least that the weights and their moments take of each process's device with these values."""
        sections = step_sections(self._resolved, values)
        parts = weight_parts(sections.parallel, self._target.rank_info)
        return self._resolved.n_parameters * _least_each(sections) / parts

    def rows(self, settled: Recipe) -> str:
        """The rows of a micro-batch in words."""
        rows, length = rows_at_once(settled.train), self._resolved.max_length
        if not settled.data.packs_rows:
            return "documents that are not packed stay alone"
        return f"{rows} row{'' if rows == 1 else 's'} of {length:,} tokens at a time"


def _least_each(sections: StepSections) -> float:
    """Bytes of a device that each parameter takes at least: its weight, and its moments."""
    if sections.parallel.offload == "host":
        return 0.0
    if sections.adapter.kind != "none" or sections.model.freeze:
        return {"none": 2.0, "int8": 1.0, "nf4": 0.5}[sections.model.quantize]
    weight, optimizer = BYTES[str(sections.model.dtype)], sections.optimizer
    if not isinstance(optimizer, AdamwOptimizer) or optimizer.offload == "host":
        return weight
    if optimizer.state == "8bit":
        return weight + 2.0
    return weight + (8.0 if optimizer.rounding == "stochastic" else 2.0 * weight)  # nearest: as the weights are


class Trials:
    """What is predicted of a recipe's variants: quickly at first, whole for what is to be chosen.

    ``values`` of a variant are those that are searched; its overrides, those in which it differs from the recipe, have
    those in ``always`` too, in which the recipe differs from the one that was asked for.
    """

    def __init__(
        self, recipe: Recipe, target: Target, prepared: Path | None = None, always: Values | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.recipe, self.target, self.speed = recipe, target, Speed(recipe, target, prepared)
        self.count = 0
        """Predictions that were made."""
        self.refused: list[RecipeError] = []
        self._prepared, self._always, self._notify = prepared, dict(always or {}), notify
        self._predicted: dict[str, Choice] = {}
        self._tried: dict[str, Choice | None] = {}
        self._whole: dict[str, Choice] = {}

    @property
    def predicted(self) -> list[Choice]:
        """All that were predicted, in their order."""
        return list(self._predicted.values())

    @property
    def tried(self) -> list[Choice]:
        """All that were found to be possible, those that are predicted whole in the place of the quick ones."""
        return [self._whole.get(key, choice) for key, choice in self._tried.items() if choice is not None]

    def fitting(self) -> list[Choice]:
        """Those of them that fit, the fastest first."""
        return sorted((c for c in self.tried if c.fits), key=lambda choice: (choice.step_s, len(choice.overrides)))

    def refusal(self, values: Values) -> str | None:
        """Why these values do not go together; None where they do."""
        recipe, processes = changed(self.recipe, values), self.target.rank_info.world_size
        together = rows_at_once(recipe.train) * data_processes(recipe.parallel, processes)
        if recipe.train.global_batch_size % together:
            return f"{recipe.train.global_batch_size} rows do not divide into {together} at once"
        return refusal(recipe)

    def differing(self, values: Values) -> dict[str, Any]:
        """Those of the values that are not the recipe's."""
        return {key: value for key, value in values.items() if value_of(self.recipe, key) != value}

    def predict(self, values: Values) -> Choice:
        """What is predicted with these values. Raises what predicting raises."""
        key = _key(self.differing(values))
        if key not in self._predicted:
            self.count += 1
            recipe = changed(self.recipe, values)
            prediction = predict_by_layers(recipe, self.target, self.speed.layers, self._prepared)
            self._predicted[key] = Choice({**self._always, **self.differing(values)}, prediction)
        return self._predicted[key]

    def largest(self, values: Values, sizes: Sequence[int], roomy: bool = False) -> Choice | None:
        """The largest of these micro-batches that fits with such values, found from both ends; None where none does.

        Where the device is ``roomy`` the largest of all is tried before the smallest.
        """
        if not sizes:
            return None
        if roomy and (most := self.predict({**values, MICRO: sizes[-1]})).fits:
            return most
        least = self.predict({**values, MICRO: sizes[0]})
        if not least.fits:
            return None
        for size in sizes[:0:-1]:
            if self._has_room(least, sizes[0], size) and (choice := self.predict({**values, MICRO: size})).fits:
                return choice
        return least

    def choice(self, values: Values) -> Choice | None:
        """What is predicted with these values; None where the model cannot be trained so.

        Where only the host has too little room, a copy for saves in the background is given up.
        """
        key = _key(values)
        if key not in self._tried:
            choice = self._possible(values)
            if choice is not None and choice.lacks_host and choice.prediction.memory.host.get("staging"):
                choice = self._possible({**values, ASYNC: False}) or choice
            self._tried[key] = choice
        return self._tried[key]

    def confirmed(self, values: Values) -> Choice | None:
        """The same, predicted whole."""
        quick = self.choice(values)
        if quick is None or self.speed.layers == 0:
            return quick
        wanted = {**values, **{name: value for name, value in quick.overrides.items() if name == ASYNC}}
        self.count += 1
        whole = predict(changed(self.recipe, wanted), self.target)
        self._whole[_key(values)] = sure = Choice(quick.overrides, self._timed(whole, values))
        return sure

    def too_large(self, values: Values) -> bool:
        """Whether the weights and their state alone are too much, for which nothing is predicted."""
        return self.speed.state_bytes(values) > self.target.limit_bytes

    def may_fit(self, values: Values) -> bool:
        """Whether there is room for what is known to grow with the rows, by what was predicted for fewer."""
        return all(
            less is None or self._has_room(less, rows, values[MICRO]) for rows in range(1, values[MICRO])
            for less in [self._tried.get(_key({**values, MICRO: rows}))]
        )

    def _has_room(self, choice: Choice, rows: int, more: int) -> bool:
        """Whether there is room for what is known to grow with the rows: activations that are kept."""
        peak = choice.prediction.memory.peak
        grown = peak.total + peak.parts["activations"] * (more - rows) // rows
        return grown * (1 + choice.prediction.error) <= self.target.limit_bytes

    def _possible(self, values: Values) -> Choice | None:
        try:
            choice = self.predict(values)
        except RecipeError as error:
            self.refused.append(error)
            self._notify(f"{described({**self._always, **self.differing(values)})}: {error.message}")
            return None
        prediction = choice.prediction
        self._notify(f"{described(choice.overrides)}: {gib(prediction.peak_bytes)}, {prediction.verdict}")
        return replace(choice, prediction=self._timed(prediction, values))

    def _timed(self, prediction: Prediction, values: Values) -> Prediction:
        """The prediction with the time of all layers on this target, wherever it was made for."""
        busy_s = self.speed.busy_s(values)
        time = replace(prediction.time, busy_s=busy_s, step_s=seconds_of(busy_s, prediction.time.traffic))
        return replace(prediction, time=time)


@dataclass(frozen=True)
class Dimension:
    """What is varied: settings, each as values by key, from the one that needs least memory to the one that needs most.

    ``is_optional`` ones may be left at their last setting where the model refuses the others.
    """

    settings: tuple[Values, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class Leaf:
    """A combination: the place of each dimension's setting, its values, and the least seconds of a step."""

    places: tuple[int, ...]
    values: dict[str, Any]
    seconds: float


class Tree:
    """All combinations of the dimensions that may be tried together, of which few are predicted to find the fastest.

    Settings are ordered by what memory grows with. A branch of the tree is what some of them have; where its leanest
    combination does not fit, nothing of it does (memory is assumed to be monotonic in each setting), and the branch is
    cut. Branches are taken up in the order of the least time that any combination of theirs is estimated to take, so
    that the first whole combination that comes up is the fastest (best-first branch and bound; Land and Doig 1960).
    """

    def __init__(self, dimensions: Sequence[Dimension], seconds: Callable[[Values], float], trials: Trials) -> None:
        self._dimensions, self._trials = list(dimensions), trials
        self._seconds = seconds
        self.leaves: list[Leaf] = []

    def fastest(self) -> Choice | None:
        """The fastest combination that fits, predicted whole; None where none does.

        Raises what predicting raises where no combination can be predicted.
        """
        self.leaves = list(self._combinations())
        if self._trials.too_large(self.leanest()):
            return None
        self._leave_refused()
        waiting: list[tuple[float, int, int, tuple[int, ...], bool]] = []
        self._push(waiting, ())
        while waiting:
            _, _, _, prefix, is_final = heapq.heappop(waiting)
            leaf = self._leanest(prefix)
            if is_final:
                if (sure := self._trials.confirmed(leaf.values)) is not None and sure.fits:
                    return sure
                continue
            found = None if self._trials.too_large(leaf.values) else self._trials.choice(leaf.values)
            if found is None or not (found.fits or found.lacks_host):
                continue
            if len(prefix) < len(self._dimensions):
                for place in range(len(self._dimensions[len(prefix)].settings)):
                    self._push(waiting, (*prefix, place))
            elif found.fits:
                cost = (found.step_s, len(found.overrides))
                heapq.heappush(waiting, (*cost, -len(prefix), prefix, True))
        return None

    def leanest(self) -> dict[str, Any]:
        """The values of the combination that needs least memory."""
        return self._leanest(()).values

    def _leave_refused(self) -> None:
        """Drop the dimensions that the model refuses, which shows in the leanest combination of all."""
        if self._trials.choice(self.leanest()) is not None:
            return
        kept = self._dimensions
        optional = [dimension for dimension in kept if dimension.is_optional]
        for left in [*([dimension] for dimension in optional), optional]:
            self._dimensions = [Dimension(one.settings[-1:]) if one in left else one for one in kept]
            self.leaves = list(self._combinations())
            if self._trials.choice(self.leanest()) is not None:
                return
        raise self._trials.refused[-1]

    def _combinations(self) -> Iterator[Leaf]:
        for places in product(*(range(len(dimension.settings)) for dimension in self._dimensions)):
            values: dict[str, Any] = {}
            for dimension, place in zip(self._dimensions, places, strict=True):
                values |= dimension.settings[place]
            if self._trials.refusal(values) is None:
                yield Leaf(places, values, self._seconds(values))

    def _push(self, waiting: list[tuple[float, int, int, tuple[int, ...], bool]], prefix: tuple[int, ...]) -> None:
        """Have a branch wait for its turn, where it has combinations that there may be room for."""
        within = self._within(prefix)
        if not within or (MICRO in within[0].values and not self._trials.may_fit(self._leanest(prefix).values)):
            return
        best = min(within, key=lambda leaf: (leaf.seconds, self._differing(leaf)))
        heapq.heappush(waiting, (best.seconds, self._differing(best), -len(prefix), prefix, False))

    def _differing(self, leaf: Leaf) -> int:
        """How many settings are not those of the recipe."""
        return len(self._trials.differing(leaf.values))

    def _within(self, prefix: tuple[int, ...]) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.places[: len(prefix)] == prefix]

    def _leanest(self, prefix: tuple[int, ...]) -> Leaf:
        return min(self._within(prefix), key=lambda leaf: leaf.places)


def row_counts(recipe: Recipe, target: Target) -> list[int]:
    """Numbers of rows into which the global batch divides evenly on all processes that have rows of their own."""
    each = recipe.train.global_batch_size // data_processes(recipe.parallel, target.rank_info.world_size)
    return [size for size in range(1, each + 1) if each % size == 0]


def described(overrides: Mapping[str, Any]) -> str:
    """The keys and values in which a choice differs from its recipe."""
    return ", ".join(f"{key} {value}" for key, value in overrides.items()) or "the recipe as it is"


def _key(values: Values) -> str:
    return repr(sorted(values.items()))


HOST_STATE = "optimizer.offload"
ASYNC = "checkpoint.async_save"
KIND = "adapter.kind"


@dataclass(frozen=True)
class Tradeoff:
    """Values that change what is computed, and how, key by key; none where nothing changes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    last_resort: bool = False

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with its values."""
        values = dict(self.values)
        if values.pop(KIND, None) is not None:
            recipe = recipe.model_copy(update={"adapter": LoraAdapter(kind="lora")})
        return changed(recipe, values)


EIGHT_BIT = {"optimizer.state": "8bit"}
ROUNDED = {"model.dtype": "bf16", "optimizer.rounding": "stochastic"}
ADAPTED = {KIND: "lora"}
WORDS = {
    "optimizer.state": "AdamW's moments are kept in 8 bits",
    "model.dtype": "weights are kept in bf16",
    "optimizer.rounding": "updates are rounded to bf16 at random",
    "model.quantize": "the frozen base is kept in fewer bits",
    KIND: "an adapter is trained, not the weights",
}
"""What each key that changes results does to them."""


def memory_options(recipe: Recipe, device_kind: str) -> dict[str, tuple[Any, ...]]:
    """Keys that cost time and no accuracy, each with its values from the one that needs least memory on.

    A CPU has no memory but the host's; an adapter has little optimizer state to keep there.
    """
    if device_kind != "cuda":
        return {TILED: (True, False)}
    is_here = recipe.parallel.offload == "none" and recipe.adapter.kind == "none"
    has_state = isinstance(recipe.optimizer, AdamwOptimizer) and not recipe.optimizer.rows
    host_state = {HOST_STATE: ("host", "none")} if has_state and is_here else {}
    return {**host_state, TILED: (True, False), OFFLOAD: (True, False)}


def tradeoffs_of(recipe: Recipe) -> list[Tradeoff]:
    """What is tried one after the other, from what changes nothing to what changes most."""
    adapted, adamw = recipe.adapter.kind != "none", isinstance(recipe.optimizer, AdamwOptimizer)
    ways: list[Mapping[str, Any]] = [{}]
    if adapted and recipe.model.quantize == "none":
        ways += [{"model.quantize": "int8"}, {"model.quantize": "nf4"}]
    elif not adapted and adamw and not recipe.model.freeze:
        ways += [EIGHT_BIT, ROUNDED, {**EIGHT_BIT, **ROUNDED}]
    found = [_tradeoff(recipe, values) for values in ways]
    if not adapted and not recipe.model.freeze:
        found += [_tradeoff(recipe, values, True) for values in (ADAPTED, {**ADAPTED, "model.quantize": "nf4"})]
    distinct = [each for number, each in enumerate(found) if each not in found[:number]]
    return [each for each in distinct if not refusal(each.of(recipe))]


def _tradeoff(recipe: Recipe, values: Mapping[str, Any], last_resort: bool = False) -> Tradeoff:
    """Those of the values in which the recipe differs."""
    other = {key: value for key, value in values.items() if value_of(recipe, key) != value}
    return Tradeoff(other, {key: WORDS[key] for key in other}, last_resort)


def refusal(recipe: Recipe) -> str | None:
    """Why a recipe is refused when it is loaded; None where it is not."""
    return next((said for rule in RULES if (said := rule.check(recipe, set())) is not None), None)


def lines_to_write(recipe: Recipe) -> Sequence[str]:
    """What else would need less memory and changes results, as it is written, each with what it changes."""
    return [
        ", ".join(f"{key}: {value}" for key, value in each.values.items()) + f" ({'; '.join(each.changes.values())})"
        for each in tradeoffs_of(recipe) if each.values
    ]
