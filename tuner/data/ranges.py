"""What lies end to end: where each part begins, and the places of chosen parts."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def offsets_of(lengths: npt.NDArray[np.integer | np.bool_], dtype: type[np.integer] = np.int64) -> npt.NDArray[Any]:
    """dtype[n + 1]: the sums of the first 0, 1, ... lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=dtype)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(first: Ints | int, count: Ints, dtype: type[np.integer] = np.int64) -> npt.NDArray[Any]:
    """The ranges [first, first + count), end to end."""
    found = np.arange(count.sum(), dtype=dtype)
    found += np.repeat((first - (np.cumsum(count) - count)).astype(dtype), count)
    return found
