"""Rows that are short at first and become longer over the first steps (Li, Zhang and He 2022,
https://arxiv.org/abs/2108.06084): how long those of a step are follows from its number alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from tuner.data.batches import GlobalBatches, StepBatches
from tuner.data.prepared import PackedRows, Row


@dataclass(frozen=True)
class RowLengths:
    """Rows of ``start`` tokens that grow to ``whole`` over so many ``steps``, by multiples of ``multiple_of``."""

    steps: int
    start: int
    multiple_of: int
    truncate: bool
    """Whether what is beyond is left out; documents end there, and others begin, otherwise."""
    whole: int

    def length(self, step: int) -> int | None:
        """Tokens of the rows of a step, counted from 0; None where they are whole."""
        if step >= self.steps:
            return None
        grown = self.start + (self.whole - self.start) * step // self.steps
        return max(self.start, grown // self.multiple_of * self.multiple_of)

    def cut(self, row: Row, length: int) -> Row:
        """A row whose documents end after each ``length`` tokens; of one that is truncated, its first ones alone.

        Each part of a document is a document of its own, with its number and columns. A row of trained targets' columns
        is none that is cut.
        """
        ends = np.cumsum(row.lengths, dtype=np.int64)
        edges = np.union1d(ends, np.arange(length, ends[-1], length))
        edges = edges[edges <= length] if self.truncate else edges
        document = np.searchsorted(ends, edges)
        return Row(
            input_ids=row.input_ids[: edges[-1]], trained=row.trained[: edges[-1]],
            lengths=np.diff(edges, prepend=0).astype(np.int32), documents=row.documents[document],
            columns={name: values[document] for name, values in row.columns.items()},
        )


class _RowsInMemory(PackedRows):
    """The rows of one step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._cut = rows
        firsts = [np.cumsum(row.lengths) - row.lengths for row in rows]
        trained = [row.trained.sum() - row.trained[first].sum() for row, first in zip(rows, firsts, strict=True)]
        self.tokens_per_row = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
        self.trained_per_row = np.array(trained, dtype=np.int64)
        self.documents_per_row = np.array([len(row.lengths) for row in rows], dtype=np.int64)
        self.squares_per_row = np.array([(row.lengths.astype(np.int64) ** 2).sum() for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._cut)

    def fetch(self, row_ids: Iterable[int]) -> None:
        """Nothing is to be fetched."""

    def row(self, i: int) -> Row:
        """Return row i."""
        return self._cut[i]


@dataclass(eq=False, kw_only=True)
class GrowingBatches(GlobalBatches):
    """The batches of a run whose first steps have short rows: the same rows in the same order on any world size."""

    warmup: RowLengths
    begun: int
    """The step of the run after which the data begins."""

    @staticmethod
    def of(batches: GlobalBatches, warmup: RowLengths, begun: int) -> GrowingBatches:
        """Batches whose rows are cut in the steps of the warm-up."""
        given = {each.name: getattr(batches, each.name) for each in fields(batches) if each.init}
        return GrowingBatches(**given, warmup=warmup, begun=begun)

    def step(self, i: int) -> StepBatches:
        """Return step i (from 0). In the warm-up every process reads all rows of the step, for their counts."""
        if (length := self.warmup.length(self.begun + i)) is None:
            return super().step(i)
        row_ids = self.row_ids(i)
        rows = _RowsInMemory([self.warmup.cut(self.rows.row(int(row_id)), length) for row_id in row_ids])
        of_step = replace(self, rows=rows, shuffle=False, global_batch_size=len(rows), begun=self.warmup.steps)
        return replace(of_step.step(0), row_ids=row_ids)
