"""Variants of one recipe that were predicted to see whether they fit; each is predicted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.profile.estimate import seconds_of
from tuner.profile.means import ASYNC, refusal
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.profile.search import Choice, described
from tuner.profile.shortened import predict_by_layers
from tuner.profile.speed import Speed
from tuner.runtime.files import gib
from tuner.setup.settled import MICRO, OFFLOAD, TILED, changed, data_processes, rows_at_once, value_of

Predict = Callable[[Recipe, Target, int, Path | None], Prediction]


def predict_whole(recipe: Recipe, target: Target, layers: int, prepared: Path | None = None) -> Prediction:
    """What `predict` says, of as many layers as there are."""
    return predict(recipe, target, prepared)


@dataclass(frozen=True)
class How:
    """How variants are predicted: quickly at first, and whole before one is chosen; None chooses by the quick ones."""

    quick: Predict = predict_by_layers
    whole: Predict | None = predict_whole


PLAINLY = How()


class Trials:
    """What is predicted of a recipe's variants: roughly and quickly at first, whole for what is to be chosen.

    ``values`` of a variant are those that are searched; its overrides have those in ``always`` too, in which the recipe
    differs from the one that was asked for.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        always: Mapping[str, Any],
        notify: Callable[[str], None] = lambda line: None,
        how: How = PLAINLY,
    ) -> None:
        self.recipe, self.target, self.how, self.speed = recipe, target, how, Speed(recipe, target)
        self.count = 0
        """Predictions that were made."""
        self.refused: list[RecipeError] = []
        self._always, self._notify = dict(always), notify
        self._tried: dict[str, Choice | None] = {}
        self._whole: dict[str, Choice] = {}

    @property
    def found(self) -> list[Choice]:
        """All that were predicted, those that are whole in the place of the quick ones."""
        return [self._whole.get(key, choice) for key, choice in self._tried.items() if choice is not None]

    def fitting(self) -> list[Choice]:
        """Those of them that fit, the fastest first."""
        return sorted((c for c in self.found if c.fits), key=lambda choice: (choice.step_s, len(choice.overrides)))

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """Why these values do not go together; None where they do."""
        recipe, processes = changed(self.recipe, values), self.target.rank_info.world_size
        together = rows_at_once(recipe) * data_processes(recipe, processes)
        if recipe.train.global_batch_size % together:
            return f"{recipe.train.global_batch_size} rows do not divide into {together} at once"
        return refusal(recipe)

    def differing(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the values that are not the recipe's."""
        return {key: value for key, value in values.items() if not self._is_recipes(key, value)}

    def choice(self, values: Mapping[str, Any]) -> Choice | None:
        """What is predicted with these values; None where the model cannot be trained so.

        Where only the host has too little room, a copy for saves in the background is given up.
        """
        key = _key(values)
        if key not in self._tried:
            found = self._predicted(values)
            if found is not None and found.lacks_host and found.prediction.memory.host.get("staging"):
                found = self._predicted({**values, ASYNC: False}) or found
            self._tried[key] = found
        return self._tried[key]

    def confirmed(self, values: Mapping[str, Any]) -> Choice | None:
        """The same, predicted whole."""
        quick, key = self.choice(values), _key(values)
        if quick is None or self.how.whole is None or self.speed.layers == 0:
            return quick
        if key not in self._whole:
            wanted = {**values, **{name: value for name, value in quick.overrides.items() if name == ASYNC}}
            self.count += 1
            whole = self.how.whole(changed(self.recipe, wanted), self.target, self.speed.layers, None)
            self._whole[key] = Choice(quick.overrides, self._timed(whole, values))
        return self._whole[key]

    def too_large(self, values: Mapping[str, Any]) -> bool:
        """Whether the weights and their state alone are too much, for which nothing is predicted."""
        return self.speed.state_bytes(values) > self.target.limit_bytes

    def may_fit(self, values: Mapping[str, Any]) -> bool:
        """Whether there is room for what is known to grow with the rows, by what was predicted for fewer."""
        return all(
            less is None or self._has_room(less, rows, values[MICRO])
            for rows in range(1, values[MICRO])
            for less in [self._tried.get(_key({**values, MICRO: rows}))]
        )

    def _has_room(self, choice: Choice, rows: int, more: int) -> bool:
        peak = choice.prediction.memory.peak
        grown = peak.total + peak.parts["activations"] * (more - rows) // rows
        return grown * (1 + choice.prediction.error) <= self.target.limit_bytes

    def _is_recipes(self, key: str, value: Any) -> bool:
        """Whether the recipe has a value already, or comes to it by itself where that fits."""
        had = value_of(self.recipe, key)
        return had == value or (key in {TILED, OFFLOAD} and had == "auto" and value is False)

    def _predicted(self, values: Mapping[str, Any]) -> Choice | None:
        overrides, self.count = {**self._always, **self.differing(values)}, self.count + 1
        try:
            prediction = self.how.quick(changed(self.recipe, values), self.target, self.speed.layers, None)
        except RecipeError as error:
            self.refused.append(error)
            self._notify(f"{described(overrides)}: {error.message}")
            return None
        found = Choice(overrides, self._timed(prediction, values))
        self._notify(f"{described(overrides)}: {gib(prediction.peak_bytes)}, {prediction.verdict}")
        return found

    def _timed(self, prediction: Prediction, values: Mapping[str, Any]) -> Prediction:
        """The prediction with the time of all layers on this target, wherever it was made for."""
        busy_s = self.speed.busy_s(values)
        time = replace(prediction.time, busy_s=busy_s, step_s=seconds_of(busy_s, prediction.time.traffic))
        return replace(prediction, time=time)


def _key(values: Mapping[str, Any]) -> str:
    return repr(sorted(values.items()))
