"""Rows of one step given to micro-batches and ranks so that nobody waits long: a pure function of the rows' costs."""

import heapq

import numpy as np
import numpy.typing as npt

LINEAR_TOKENS = 16_384
"""The document length at which attention costs as much as all products with weights.

A token costs 6 N floating-point operations in the products and 6 L d times its document's length in causal attention
(N weights in L layers of width d). With N = 12 L d^2 the two are equal at 12 d tokens: 16,384 is d = 1,365.
"""


def row_costs(tokens: npt.NDArray[np.int64], squares: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64[rows]: what rows cost, from their tokens and the sum of their squared document lengths.

    Full rows differ in the squares alone; where each row is one document, short ones still cost their tokens.
    """
    return tokens * LINEAR_TOKENS + squares


def balance_rows(
    costs: npt.NDArray[np.int64], n_micro: int, world_size: int, micro_batch_size: int
) -> list[list[npt.NDArray[np.int64]]]:
    """Distribute rows over `n_micro` micro-batches of `world_size` slots, each of at most `micro_batch_size` rows.

    Returns for each micro-batch and rank the indices into `costs`, ascending. Ranks wait for each other in every
    micro-batch, so a step takes the sum, over micro-batches, of the most expensive slot:

    1. the costliest row goes to the cheapest slot with room, then the next one: slots cost about the same (longest
       processing time first, Graham 1969), which keeps the memory of micro-batches even too;
    2. slots next to each other in cost make up a micro-batch, the costliest first: with one row a slot no other
       grouping has a smaller sum;
    3. in a micro-batch the costliest slot goes to the rank with least to do so far.

    Rows of equal cost stay in their order. Takes rows x log(rows).
    """
    n_slots = n_micro * world_size
    if len(costs) == 0 or costs.min() == costs.max():
        slots = np.array_split(np.arange(len(costs), dtype=np.int64), n_slots)
        return [slots[i : i + world_size] for i in range(0, n_slots, world_size)]
    rows, loads = _even_slots(costs, n_slots, micro_batch_size)
    by_cost = sorted(range(n_slots), key=lambda slot: -loads[slot])
    totals = [0] * world_size
    balanced = []
    for first in range(0, n_slots, world_size):
        shares = [np.empty(0, dtype=np.int64)] * world_size
        idlest_first = sorted(range(world_size), key=lambda rank: totals[rank])
        for rank, slot in zip(idlest_first, by_cost[first : first + world_size], strict=True):
            shares[rank] = np.array(sorted(rows[slot]), dtype=np.int64)
            totals[rank] += loads[slot]
        balanced.append(shares)
    return balanced


def _even_slots(costs: npt.NDArray[np.int64], n_slots: int, room: int) -> tuple[list[list[int]], list[int]]:
    """The rows of each slot, at most `room`, and what they cost together."""
    rows: list[list[int]] = [[] for _ in range(n_slots)]
    loads = [0] * n_slots
    cheapest = [(0, slot) for slot in range(n_slots)]
    for row in np.argsort(-costs, kind="stable").tolist():
        _, slot = cheapest[0]
        rows[slot].append(row)
        loads[slot] += int(costs[row])
        if len(rows[slot]) < room:
            heapq.heapreplace(cheapest, (loads[slot], slot))
        else:
            heapq.heappop(cheapest)
    return rows, loads
