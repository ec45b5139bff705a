"""Rows to batches: their order, each rank's share of every global batch, and flat token arrays with shifted targets.

All are pure functions of the seed and the rows, so that resuming is arithmetic, whatever the number of processes.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.batch_sizes import BatchSizes
from tuner.data.prepared import PackedRows, Row

IGNORED = -100
"""The target of a position that is not trained."""
_MASK64 = (1 << 64) - 1
LINEAR_TOKENS = 16_384
"""The document length at which attention costs as much as all products with weights.

A token costs 6 N floating-point operations in the products and 6 L d times its document's length in causal attention
(N weights in L layers of width d). With N = 12 L d^2 the two are equal at 12 d tokens: 16,384 is d = 1,365.
"""


@dataclass(frozen=True)
class Batch:
    """One forward's tokens, flat: T tokens of one or more rows laid end to end.

    `targets[t]` is the token after t where that token is trained and in the same document, else -100.
    """

    input_ids: npt.NDArray[np.int64]
    """int64[T]"""
    targets: npt.NDArray[np.int64]
    """int64[T], already shifted inside each document."""
    position_ids: npt.NDArray[np.int64]
    """int64[T], from 0 in every document."""
    lengths: tuple[int, ...]
    """Document lengths in order; their sum is T."""
    trained_positions: npt.NDArray[np.int64]
    """int64[n], the indices whose target is not -100."""
    documents: npt.NDArray[np.int64]
    """int64[len(lengths)]: the number of each document in its split; pieces of a split document share theirs.

    Empty for a batch that only keeps a rank in step with others: none of its documents counts.
    """
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[len(documents)] each: what is known of each document besides its tokens."""
    of_trained: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[n, ...] each: what is known of each of the n trained positions, such as a teacher's most probable tokens."""

    @property
    def document_of_trained(self) -> npt.NDArray[np.int64]:
        """int64[n]: which of the batch's documents each trained position belongs to, counted from 0 in their order."""
        return np.searchsorted(np.cumsum(self.lengths), self.trained_positions, side="right")

    @property
    def trained_per_document(self) -> npt.NDArray[np.int64]:
        """int64[len(documents)]: trained targets of each document."""
        return np.bincount(self.document_of_trained, minlength=len(self.documents))


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step: the global batch's counts and this rank's forwards."""

    row_ids: npt.NDArray[np.int64]
    """The rows of the whole global batch, on every rank."""
    trained_count: int
    """Trained targets in the global batch: what the loss is divided by."""
    tokens: int
    """Tokens in the global batch."""
    micro: list[Batch]
    """This rank's forwards; every rank has the same number of them."""
    trained_per_document: npt.NDArray[np.int64] | None = None
    """int64[documents]: trained targets of each document of the global batch, where they were asked for."""
    documents: int = 0
    """Documents in the global batch, a piece of a split one as one."""
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[documents] each: columns of the documents of the global batch, where they were asked for."""
    mismatched: list[Batch] = field(default_factory=list)
    """One for each of `micro`, where they were asked for: its prompts, each with the answer to another one."""


def collate(rows: Sequence[Row]) -> Batch:
    """Lay `rows` (at least one) end to end; documents stay apart through `lengths` and `position_ids`."""
    input_ids = np.concatenate([row.input_ids for row in rows])
    trained = np.concatenate([row.trained for row in rows])
    lengths = np.concatenate([row.lengths for row in rows]).astype(np.int64)
    ends = np.cumsum(lengths)
    targets = np.full(len(input_ids), IGNORED, dtype=np.int64)
    targets[:-1] = np.where(trained[1:], input_ids[1:], IGNORED)
    # The last token of a document would be asked for the first one of the next.
    targets[ends - 1] = IGNORED
    position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(ends - lengths, lengths)
    return Batch(
        input_ids, targets, position_ids, tuple(lengths.tolist()),
        trained_positions=np.flatnonzero(targets != IGNORED).astype(np.int64, copy=False),
        documents=np.concatenate([row.documents for row in rows]),
        columns=_columns(rows),
        of_trained={name: np.concatenate([row.of_trained[name] for row in rows]) for name in rows[0].of_trained},
    )  # fmt: skip


def without_targets(batch: Batch) -> Batch:
    """Return the batch with every target -100: it takes part in the collectives and adds nothing to the loss."""
    none = np.empty(0, dtype=np.int64)
    return replace(
        batch, targets=np.full_like(batch.targets, IGNORED), trained_positions=none, documents=none,
        columns={name: values[:0] for name, values in batch.columns.items()},
        of_trained={name: values[:0] for name, values in batch.of_trained.items()},
    )  # fmt: skip


def selected(batch: Batch, chosen: npt.NDArray[np.bool_]) -> Batch:
    """The batch of those documents alone that are chosen, ``bool[documents]``, at least one, in their order."""
    lengths = np.array(batch.lengths, dtype=np.int64)
    tokens = np.repeat(chosen, lengths)
    targets, kept = batch.targets[tokens], chosen[batch.document_of_trained]
    return Batch(
        batch.input_ids[tokens], targets, batch.position_ids[tokens], tuple(lengths[chosen].tolist()),
        trained_positions=np.flatnonzero(targets != IGNORED).astype(np.int64, copy=False),
        documents=batch.documents[chosen],
        columns={name: values[chosen] for name, values in batch.columns.items()},
        of_trained={name: values[kept] for name, values in batch.of_trained.items()},
    )  # fmt: skip


def step_of(micro: Sequence[Batch], mismatched: bool = False) -> StepBatches:
    """Batches as a step of their own, with the counts of all of them; they stand for ``mismatched`` ones as well."""
    return StepBatches(
        np.empty(0, np.int64), sum(len(batch.trained_positions) for batch in micro),
        tokens=sum(len(batch.input_ids) for batch in micro), micro=list(micro),
        trained_per_document=np.concatenate([batch.trained_per_document for batch in micro]),
        documents=sum(len(batch.documents) for batch in micro),
        columns={name: np.concatenate([batch.columns[name] for batch in micro]) for name in micro[0].columns},
        mismatched=list(micro) if mismatched else [],
    )  # fmt: skip


@dataclass(eq=False)
class GlobalBatches:
    """Every step's rows, and which of them this rank computes, by arithmetic alone.

    The rows of step i depend on the seed and `global_batch_size` only, so any world size sees the same global batch.
    They are given to `micro batches x world_size` slots of at most `micro_batch_size` rows, evenly by cost.
    The last batch of an epoch may hold fewer rows; its counts say so. Rows after the first `max_rows` are left out.
    """

    rows: PackedRows
    _: KW_ONLY
    seed: int
    shuffle: bool
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    max_rows: int | None = None
    sizes: BatchSizes | None = None
    """The size of each step, where it changes; `global_batch_size` is the first one's."""
    portion: int = 0
    """Which portion of a run's data the rows are, from 0: each has an order of its own."""
    by_document: bool = False
    """Whether a step says of the whole global batch how much is trained in each document, and the columns."""
    mismatched: bool = False
    """Whether a step has the prompts with the answers to others as well; the documents need labels."""
    _epoch_order: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1 or self.micro_batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError("batch sizes must be at least 1 and the rank below the world size")

    @property
    def _n_rows(self) -> int:
        return len(self.rows) if self.max_rows is None else min(self.max_rows, len(self.rows))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, the last partial one included."""
        return math.ceil(self._n_rows / self.global_batch_size)

    def switch_to(self, rows: PackedRows, portion: int) -> None:
        """Take the rows of another portion from now on; its first step is step 0. No step may be under way."""
        self.rows, self.portion, self._epoch_order = rows, portion, None

    def row_ids(self, i: int) -> npt.NDArray[np.int64]:
        """Return the rows of step i (from 0), in the order of the global batch."""
        epoch, start, size = (self.sizes or BatchSizes(self.global_batch_size)).place(i, self._n_rows)
        epoch |= self.portion << 32
        if self.rows.is_large:
            positions = np.arange(start, min(start + size, self._n_rows), dtype=np.int64)
            return mixed_rows(self.seed, epoch, self._n_rows, positions) if self.shuffle else positions
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, row_order(self.seed, epoch, self._n_rows, self.shuffle))
        return self._epoch_order[1][start : start + size]

    def step(self, i: int) -> StepBatches:
        """Return step i (from 0): global counts and this rank's micro-batches."""
        row_ids, cheapest, own = self._shares(i)
        # In the order in which training asks for them; where all rows are here, nothing of this is computed.
        self.rows.fetch(row_id for step in (i, i + 1) for ids in self._shares(step)[2] for row_id in ids.tolist())
        every = [self.rows.row(int(row_id)) for row_id in row_ids] if self.by_document else []
        return StepBatches(
            row_ids, int(self.rows.trained_per_row[row_ids].sum()),
            tokens=int(self.rows.tokens_per_row[row_ids].sum()),
            micro=[self._batch(ids, filler=cheapest) for ids in own],
            trained_per_document=step_of([collate([row]) for row in every]).trained_per_document if every else None,
            documents=int(self.rows.documents_per_row[row_ids].sum()),
            columns=_columns(every),
            mismatched=[self._batch(ids, filler=cheapest, mismatched=True) for ids in own] if self.mismatched else [],
        )  # fmt: skip

    def _shares(self, i: int) -> tuple[npt.NDArray[np.int64], int, list[npt.NDArray[np.int64]]]:
        """The rows of step i, the cheapest of them, and those of each of this rank's micro-batches."""
        row_ids = self.row_ids(i)
        n_micro = math.ceil(len(row_ids) / (self.micro_batch_size * self.world_size))
        costs = row_costs(self.rows.tokens_per_row[row_ids], self.rows.squares_per_row[row_ids])
        balanced = balance_rows(costs, n_micro, self.world_size, self.micro_batch_size)
        return row_ids, int(row_ids[costs.argmin()]), [row_ids[shares[self.rank]] for shares in balanced]

    def _batch(self, row_ids: npt.NDArray[np.int64], filler: int, mismatched: bool = False) -> Batch:
        rows = [self.rows.row(int(row_id)) for row_id in row_ids] or [self.rows.row(filler)]
        batch = collate([self.rows.mismatched(row) for row in rows] if mismatched else rows)
        return batch if len(row_ids) else without_targets(batch)


def _columns(rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([row.columns[name] for row in rows]) for name in (rows[0].columns if rows else ())}


def row_order(seed: int, epoch: int, n_rows: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Return the row ids of one epoch, int64[n_rows], each row exactly once.

    Raw Philox words are sorted instead of calling `Generator.permutation`: numpy promises the words of a bit
    generator for ever, but not the stream of a distribution, and a resumed run must see the same order.
    """
    if not shuffle:
        return np.arange(n_rows, dtype=np.int64)
    return np.argsort(random_words(seed, epoch, n_rows), kind="stable").astype(np.int64, copy=False)


def random_words(seed: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    """uint64[count]: raw Philox words, of each seed and stream others; numpy promises them for ever."""
    return np.random.Philox(key=np.array([seed & _MASK64, stream], dtype=np.uint64)).random_raw(count)


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


def mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input reaches every bit of the output."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def mixed_rows(seed: int, epoch: int, n_rows: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows at `positions` of an epoch's order, int64 of their shape; each of `n_rows` is at one position.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2k bits, the fewest that hold all rows; what comes
    out beyond the last row goes in again until it does not (Black and Rogaway 2002), less than four times on average.
    Its keys, one a round, are raw Philox words, which numpy promises for ever.
    """
    half = np.uint64(max(1, ((n_rows - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = random_words(seed, epoch, 8)
    rows = positions.astype(np.uint64)
    beyond = np.arange(len(rows))
    while len(beyond):
        left, right = rows[beyond] >> half, rows[beyond] & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        rows[beyond] = left << half | right
        beyond = beyond[rows[beyond] >= n_rows]
    return rows.astype(np.int64)
