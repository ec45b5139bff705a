"""Documents in which a short pattern of tokens is repeated over and over, found by what equals a token before it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Repetition(NamedTuple):
    """Which repetition is too much: more than `max_count` times a pattern of `min_period` to `max_period` tokens."""

    min_period: int
    max_period: int
    max_count: int


def repeating(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64], limits: Repetition) -> npt.NDArray[np.bool_]:
    """Return bool[documents]: whether a pattern stands in a document more than `max_count` times in a row.

    `ids` are uint32[tokens] of documents that lie one after another, `offsets` int64[documents + 1]. A pattern of p
    tokens stands n times in a row where (n - 1) p tokens one after another equal those p places before.
    """
    found = np.zeros(len(offsets) - 1, dtype=np.bool_)
    longest = int(np.diff(offsets).max(initial=0))
    for period in range(limits.min_period, limits.max_period + 1):
        needed = limits.max_count * period
        if needed + period > longest:
            break
        equal = ids[period:] == ids[:-period]
        across = (offsets[1:-1, None] - 1 - np.arange(period)).reshape(-1)  # the other token is another document's
        equal[across[(across >= 0) & (across < len(equal))]] = False
        at = np.flatnonzero(equal)
        first = at[: max(len(at) - needed + 1, 0)]
        begins = first[at[needed - 1 :] - first == needed - 1]
        found[np.searchsorted(offsets, begins, side="right") - 1] = True
    return found
