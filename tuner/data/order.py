"""The order of training rows: a pure function of (seed, epoch), the same for any number of processes."""

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1


def row_order(seed: int, epoch: int, n_rows: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the row ids of one epoch, int64[n_rows], each row exactly once.

    Raw Philox words are sorted instead of calling `Generator.permutation`: numpy promises the words of a bit
    generator for ever, but not the stream of a distribution, and a resumed run must see the same order.
    """
    if not shuffle:
        return np.arange(n_rows, dtype=np.int64)
    words = np.random.Philox(key=np.array([seed & _MASK64, epoch], dtype=np.uint64)).random_raw(n_rows)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
