"""Memory of a step as the allocator saw it: every block from its allocation to its end, with its part and its owner."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tuner.profile.prediction import PARTS, Part, Phase

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass
class Block:
    """One allocation: its bytes, what for, by which module or for which parameter, and when.

    ``made`` and ``freed`` count changes of the record: `made` is -1 for what was there before, and ``freed`` is None
    for what outlives it.
    """

    size: int
    part: Part
    owner: str
    made: int
    freed: int | None = None


@dataclass(frozen=True)
class Holding:
    """Bytes of one part that a module or parameter holds; an empty owner is what lies outside of all modules."""

    owner: str
    part: Part
    bytes: int


@dataclass(frozen=True)
class Change:
    """One step of the record: when, in seconds from its start, in which phase, and the innermost module at work."""

    seconds: float
    phase: Phase
    module: str


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of one process on its device over a recorded stretch of work, in the order in which it changed."""

    blocks: Sequence[Block]
    changes: Sequence[Change]

    @cached_property
    def _levels(self) -> npt.NDArray[np.int64]:
        """Bytes of each part, before all changes and after each: ``[1 + changes, parts]``."""
        deltas = np.zeros((len(self.changes) + 1, len(PARTS)), np.int64)
        for block in self.blocks:
            part = PARTS.index(block.part)
            deltas[block.made + 1, part] += block.size
            if block.freed is not None:
                deltas[block.freed + 1, part] -= block.size
        return deltas.cumsum(axis=0)

    def totals(self) -> list[int]:
        """Bytes alive before all changes, then after each."""
        totals: list[int] = self._levels.sum(axis=1).tolist()
        return totals

    def peak_at(self) -> int:
        """The first change after which most was alive; -1 is before all of them."""
        totals = self.totals()
        return totals.index(max(totals)) - 1

    def crossing(self, limit: int) -> int | None:
        """The first change after which more than so many bytes were alive."""
        return next((at - 1 for at, total in enumerate(self.totals()) if total > limit), None)

    def alive(self, at: int) -> list[Block]:
        """What was there after change ``at``."""
        return [block for block in self.blocks if block.made <= at and (block.freed is None or block.freed > at)]

    def parts(self, at: int) -> dict[Part, int]:
        """Bytes of each part after change ``at``; they add up to the total."""
        return dict(zip(PARTS, self._levels[at + 1].tolist(), strict=True))

    def owners(self, at: int) -> list[Holding]:
        """Who held what after change ``at``, the largest first."""
        sizes: Counter[tuple[str, Part]] = Counter()
        for block in self.alive(at):
            sizes[block.owner, block.part] += block.size
        return [Holding(owner, part, size) for (owner, part), size in sizes.most_common()]

    def phase_peaks(self) -> dict[Phase, int]:
        """The largest total in each phase, over all its turns, with what it began with."""
        found: dict[Phase, int] = {}
        before, *after = self.totals()
        for change, total in zip(self.changes, after, strict=True):
            found[change.phase] = max(found.get(change.phase, 0), before, total)
            before = total
        return found

    def turns(self) -> list[tuple[Phase, float]]:
        """The phases in order, each with the second in which it took or gave memory first."""
        found: list[tuple[Phase, float]] = []
        for change in self.changes:
            if not found or found[-1][0] != change.phase:
                found.append((change.phase, round(change.seconds, 6)))
        return found

    def timeline(self, points: int = 400) -> tuple[list[float], dict[Part, list[int]]]:
        """Seconds of about so many moments, the fullest of their stretches, and bytes of each part that is there."""
        totals = self.totals()
        bounds = sorted({round(i * len(totals) / points) for i in range(points + 1)})
        kept = {0, len(totals) - 1}
        kept |= {max(range(a, b), key=totals.__getitem__) for a, b in zip(bounds, bounds[1:], strict=False)}
        times = [0.0, *(change.seconds for change in self.changes)]
        moments = sorted(kept)
        series = dict(zip(PARTS, self._levels[moments].T.tolist(), strict=True))
        return [round(times[at], 6) for at in moments], {part: sizes for part, sizes in series.items() if any(sizes)}


def alike(holdings: Iterable[Holding]) -> list[tuple[str, Part, int]]:
    """Owner, part and bytes, with owners that differ in the number of their layer taken together, largest first."""
    sizes: Counter[tuple[str, Part]] = Counter()
    counts: Counter[tuple[str, Part]] = Counter()
    for holding in holdings:
        name = _NUMBER.sub(".*", holding.owner, count=1) or "outside of modules"
        sizes[name, holding.part] += holding.bytes
        counts[name, holding.part] += 1
    found = []
    for (name, part), size in sizes.most_common():
        count = counts[name, part]
        found.append((f"{name} ({count} of them)" if "*" in name and count > 1 else name, part, size))
    return found
