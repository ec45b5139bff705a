"""The fastest combination of settings that fits, found by predicting few of them.

Settings are ordered by what memory grows with. A branch of the tree is what some of them have; where its leanest
combination does not fit, nothing of it does (memory is taken to be monotonous in each setting), and the branch is cut.
Branches are taken up in the order of the least time that any combination of theirs is estimated to take, so that the
first whole combination that comes up is the fastest (best-first branch and bound; Land and Doig 1960).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tuner.profile.search import Choice
from tuner.profile.trials import Trials
from tuner.setup.settled import MICRO

Values = Mapping[str, Any]


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
    """All combinations of the dimensions that may be tried together."""

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
            self._dimensions = [
                Dimension(dimension.settings[-1:]) if dimension in left else dimension for dimension in kept
            ]
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
