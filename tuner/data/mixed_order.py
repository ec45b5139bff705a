"""The order of an epoch with more rows than anyone holds in memory: each position's row is computed when it is due."""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_MASK64 = (1 << 64) - 1
_ROUNDS = 8


def mixed(words: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input reaches every bit of the output."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def mixed_rows(seed: int, epoch: int, n_rows: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows at `positions` of an epoch's order, int64 of their shape; each of `n_rows` is at one position.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2k bits, the fewest that hold all rows; what comes
    out beyond the last row goes in again until it does not (Black and Rogaway 2002), less than four times on average.
    Its keys are raw Philox words, which numpy promises for ever.
    """
    half = np.uint64(max(1, ((n_rows - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(key=np.array([seed & _MASK64, epoch], dtype=np.uint64)).random_raw(_ROUNDS)
    rows = positions.astype(np.uint64)
    beyond = np.arange(len(rows))
    while len(beyond):
        left, right = rows[beyond] >> half, rows[beyond] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        rows[beyond] = left << half | right
        beyond = beyond[rows[beyond] >= n_rows]
    return rows.astype(np.int64)
