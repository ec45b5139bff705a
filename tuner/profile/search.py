"""Variants of a recipe on one target, tried by prediction in the order in which memory grows, each at most once.

Memory grows with the rows of a micro-batch and shrinks with what is recomputed: for each way of sharding and level the
rows are raised until one variant does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.setup.settled import LEVEL, MICRO, changed, value_of

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


@dataclass(frozen=True)
class Space:
    """What is varied: ways of sharding, each as values by key, levels of recomputing, and rows of a micro-batch."""

    shardings: Sequence[Mapping[str, Any]]
    levels: Sequence[str]
    sizes: Sequence[int]
    """From the smallest one on."""


Pays = Callable[[Mapping[str, Any], Choice | None], bool]
"""Whether values are worth a prediction, given what fits with fewer rows, the rest being equal."""


@dataclass
class Search:
    """The variants of one recipe that were tried on a target."""

    recipe: Recipe
    target: Target
    prepared: Path | None = None
    tried: list[Choice] = field(default_factory=list)

    def choice(self, values: Mapping[str, Any]) -> Choice:
        """What is predicted with these values. Raises what predicting raises."""
        overrides = {key: value for key, value in values.items() if value_of(self.recipe, key) != value}
        known = next((choice for choice in self.tried if choice.overrides == overrides), None)
        if known is not None:
            return known
        found = Choice(overrides, predict(changed(self.recipe, values), self.target, self.prepared))
        self.tried.append(found)
        return found

    def walk(
        self, space: Space, others: Mapping[str, Any] | None = None, pays: Pays = lambda values, fewer: True
    ) -> Iterator[Choice]:
        """Choices worth a look, ``others`` changed in all: what is recomputed costs time, and pays by larger rows."""
        for sharding in space.shardings:
            largest = 0
            for level in space.levels:
                fewer = None
                for size in (size for size in space.sizes if size > largest):
                    values = {MICRO: size, LEVEL: level, **sharding, **(others or {})}
                    if not pays(values, fewer):
                        continue
                    choice = self.choice(values)
                    yield choice
                    if not choice.fits:
                        break
                    largest, fewer = size, choice


def row_counts(global_batch_size: int, target: Target) -> list[int]:
    """Numbers of rows into which the global batch divides evenly on all processes."""
    each = global_batch_size // target.rank_info.world_size
    return [size for size in range(1, each + 1) if each % size == 0]


def described(overrides: Mapping[str, Any]) -> str:
    """The keys and values in which a choice differs from its recipe."""
    return ", ".join(f"{key} {value}" for key, value in overrides.items()) or "the recipe as it is"
