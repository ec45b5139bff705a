"""How many rows each step of a run has, where that changes on the way."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple


class Place(NamedTuple):
    """Where the rows of a step stand: so many from ``start`` on in the order of an epoch, fewer at its end."""

    epoch: int
    start: int
    size: int


class Change(NamedTuple):
    """Another number of rows, from the step on that comes after so many."""

    after: int
    size: int


@dataclass(frozen=True)
class BatchSizes:
    """The size that a run begins with, and its changes in the order of steps. No step spans two epochs."""

    first: int
    changes: tuple[Change, ...] = ()

    def place(self, step: int, rows: int) -> Place:
        """That of a step, from 0, with so many rows to an epoch."""
        epoch, start, size = 0, 0, self.first
        begun = [Change(0, self.first), *(change for change in self.changes if change.after <= step)]
        for (after, size), (end, _) in pairwise([*begun, Change(step, 0)]):
            steps, left = end - after, math.ceil((rows - start) / size)
            if steps < left:
                start += steps * size
            else:
                more, rest = divmod(steps - left, math.ceil(rows / size))
                epoch, start = epoch + 1 + more, rest * size
        return Place(epoch, start, size)

    def steps(self, wanted: Fraction, rows: int) -> int:
        """The fewest steps that take so many rows, of epochs of so many each."""

        def taken(step: int) -> Fraction:
            place = self.place(step, rows)
            return Fraction(place.epoch * rows + place.start)

        return bisect_left(range(2**53), wanted, key=taken)
