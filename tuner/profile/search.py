"""Variants of a recipe on one target, tried by prediction in the order in which memory grows, each at most once.

Memory grows with the rows of a micro-batch and shrinks with what is recomputed: where some rows do not fit, more are
not tried. Where a model's layers are alike, variants are predicted from two shorter models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.profile.predict import Target
from tuner.profile.prediction import Prediction
from tuner.profile.shortened import predict_by_layers
from tuner.setup.settled import MICRO, changed, data_processes, value_of

LEVELS = ("none", "selective", "full")


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


@dataclass
class Search:
    """The variants of one recipe that were tried on a target."""

    recipe: Recipe
    target: Target
    prepared: Path | None = None
    layers: int = 0
    """Decoder layers, where all are alike; else 0."""
    tried: list[Choice] = field(default_factory=list)

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """What is predicted with these values. Raises what predicting raises."""
        overrides = {key: value for key, value in values.items() if value_of(self.recipe, key) != value}
        known = next((choice for choice in self.tried if choice.overrides == overrides), None)
        if known is not None:
            return known
        recipe = changed(self.recipe, values)
        found = Choice(overrides, predict_by_layers(recipe, self.target, self.layers, self.prepared))
        self.tried.append(found)
        return found

    def largest(self, values: Mapping[str, Any], sizes: Sequence[int], roomy: bool = False) -> Choice | None:
        """The largest of these micro-batches that fits with such values, found from both ends; None where none does.

        Where the device is ``roomy`` the largest of all is tried before the smallest.
        """
        if not sizes:
            return None
        if roomy and (most := self.choice({**values, MICRO: sizes[-1]})).fits:
            return most
        least = self.choice({**values, MICRO: sizes[0]})
        if not least.fits:
            return None
        for size in sizes[:0:-1]:
            if self._has_room(least, sizes[0], size) and (choice := self.choice({**values, MICRO: size})).fits:
                return choice
        return least

    def _has_room(self, choice: Choice, rows: int, more: int) -> bool:
        """Whether there is room for what is known to grow with the rows: activations that are kept."""
        peak = choice.prediction.memory.peak
        grown = peak.total + peak.parts["activations"] * (more - rows) // rows
        return grown * (1 + choice.prediction.error) <= self.target.limit_bytes


def row_counts(recipe: Recipe, target: Target) -> list[int]:
    """Numbers of rows into which the global batch divides evenly on all processes that have rows of their own."""
    each = recipe.train.global_batch_size // data_processes(recipe, target.rank_info.world_size)
    return [size for size in range(1, each + 1) if each % size == 0]


def described(overrides: Mapping[str, Any]) -> str:
    """The keys and values in which a choice differs from its recipe."""
    return ", ".join(f"{key} {value}" for key, value in overrides.items()) or "the recipe as it is"
