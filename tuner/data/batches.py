"""Rows to batches: flat token arrays with shifted targets, and each rank's share of every global batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.data.balance import balance_rows, row_costs
from tuner.data.order import row_order
from tuner.data.prepared import PackedRows, Row

IGNORED = -100
"""The target of a position that is not trained."""


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
        input_ids=input_ids,
        targets=targets,
        position_ids=position_ids,
        lengths=tuple(int(length) for length in lengths),
        trained_positions=np.flatnonzero(targets != IGNORED).astype(np.int64, copy=False),
        documents=np.concatenate([row.documents for row in rows]),
    )


def without_targets(batch: Batch) -> Batch:
    """Return the batch with every target -100: it takes part in the collectives and adds nothing to the loss."""
    none = np.empty(0, dtype=np.int64)
    return replace(batch, targets=np.full_like(batch.targets, IGNORED), trained_positions=none, documents=none)


class GlobalBatches:
    """Every step's rows, and which of them this rank computes, by arithmetic alone.

    The rows of step i depend on the seed and `global_batch_size` only, so any world size sees the same global batch.
    They are given to `micro batches x world_size` slots of at most `micro_batch_size` rows, evenly by cost.
    The last batch of an epoch may hold fewer rows; its counts say so. Rows after the first `max_rows` are left out.
    """

    def __init__(  # noqa: PLR0913 - the facts of one division, by keyword
        self,
        rows: PackedRows,
        *,
        seed: int,
        shuffle: bool,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        max_rows: int | None = None,
        by_document: bool = False,
    ) -> None:
        """With ``by_document`` a step says of the whole global batch how much is trained in each document."""
        if global_batch_size < 1 or micro_batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError("batch sizes must be at least 1 and the rank below the world size")
        self._rows = rows
        self._n_rows = len(rows) if max_rows is None else min(max_rows, len(rows))
        self._seed = seed
        self._shuffle = shuffle
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._by_document = by_document
        self._epoch_order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch, the last partial one included."""
        return math.ceil(self._n_rows / self._global_batch_size)

    def row_ids(self, i: int) -> npt.NDArray[np.int64]:
        """Return the rows of step i (from 0), in the order of the global batch."""
        epoch, step = divmod(i, self.steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, row_order(self._seed, epoch, self._n_rows, self._shuffle))
        start = step * self._global_batch_size
        return self._epoch_order[1][start : start + self._global_batch_size]

    def step(self, i: int) -> StepBatches:
        """Return step i (from 0): global counts and this rank's micro-batches."""
        row_ids = self.row_ids(i)
        n_micro = math.ceil(len(row_ids) / (self._micro_batch_size * self._world_size))
        costs = row_costs(self._rows.tokens_per_row[row_ids], self._rows.squares_per_row[row_ids])
        balanced = balance_rows(costs, n_micro, self._world_size, self._micro_batch_size)
        cheapest = int(row_ids[costs.argmin()])
        return StepBatches(
            row_ids=row_ids,
            trained_count=int(self._rows.trained_per_row[row_ids].sum()),
            tokens=int(self._rows.tokens_per_row[row_ids].sum()),
            micro=[self._batch(row_ids[shares[self._rank]], filler=cheapest) for shares in balanced],
            trained_per_document=self._trained_per_document(row_ids) if self._by_document else None,
        )

    def _trained_per_document(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.concatenate([collate([self._rows.row(int(row_id))]).trained_per_document for row_id in row_ids])

    def _batch(self, row_ids: npt.NDArray[np.int64], filler: int) -> Batch:
        if len(row_ids) == 0:
            return without_targets(collate([self._rows.row(filler)]))
        return collate([self._rows.row(int(row_id)) for row_id in row_ids])
