"""Made-up packed rows: the same ones for every layout, in documents of uneven lengths, a part of them trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tuner.config.methods import Examples
from tuner.data.batches import Batch, StepBatches, collate, step_of
from tuner.data.prepared import Row
from tuner.parallel.mesh import Mesh
from tuner.prove.twin import LONGEST, ROWS
from tuner.train.methods.method import Method

STEPS_APART = 4
"""Steps after which rows come again, so that a loss falls."""
_FIRST_ID = 3
"""Below it are special tokens."""
_UNTRAINED = 4
"""Tokens at the beginning of a document that are not trained, as those of a prompt."""


@dataclass(frozen=True)
class Rows:
    """Where the rows of a proof come from: ids below ``vocabulary``, documents as the method has them."""

    examples: Examples
    vocabulary: int
    accumulate: int
    seed: int

    def step(self, index: int, method: Method, mesh: Mesh) -> StepBatches:
        """What one process of a mesh computes in a step: its part of the rows, with the counts of all of them."""
        return self.of(index, method, self.micro(mesh))

    def micro(self, mesh: Mesh) -> list[range]:
        """The numbers of the rows in each micro-batch of one process."""
        per_process = ROWS // mesh.data_size
        first, count = mesh.data_rank * per_process, min(self.accumulate, per_process)
        size = per_process // count
        return [range(start, start + size) for start in range(first, first + per_process, size)]

    def each(self, index: int, method: Method) -> StepBatches:
        """A step in one process with a micro-batch for each row."""
        return self.of(index, method, [range(number, number + 1) for number in range(ROWS)])

    def of(self, index: int, method: Method, micro: list[range]) -> StepBatches:
        """A step with these micro-batches, by the numbers of their rows, and the counts of all rows."""
        rows = [self._row(index % STEPS_APART, number) for number in range(ROWS)]
        whole = step_of([method.made_up(collate([row])) for row in rows], method.mismatched)
        own: list[Batch] = [method.made_up(collate([rows[number] for number in some])) for some in micro]
        return replace(whole, micro=own, mismatched=own if method.mismatched else [])

    def _row(self, step: int, number: int) -> Row:
        """One row: the first of a step is a single document or pair, others hold several of them."""
        draw = np.random.default_rng((self.seed, step, number))
        length = LONGEST - number % 5
        lengths = self._lengths(draw, length, alone=number == 0)
        ids = draw.integers(_FIRST_ID, self.vocabulary, sum(lengths), dtype=np.int64)
        trained = np.ones(len(ids), dtype=np.bool_)
        if self.examples.kind != "pretrain":
            starts = np.cumsum([0, *lengths[:-1]])
            for start in starts:
                trained[start : start + _UNTRAINED] = False
        documents = np.arange(len(lengths), dtype=np.int64)
        columns: dict[str, Any] = {}
        if self.examples.kind == "unpaired":
            columns["label"] = (documents + number) % 2 == 0
        sizes = np.array(lengths, dtype=np.int32)
        return Row(ids, trained, sizes, documents + number * LONGEST, columns)

    def _lengths(self, draw: np.random.Generator, length: int, alone: bool) -> list[int]:
        """Lengths of documents that fill a row; of pairs, two of each."""
        per_example = self.examples.documents
        shortest = 2 * _UNTRAINED
        count = per_example if alone else per_example * (2 if per_example > 1 else int(draw.integers(2, 5)))
        cuts = draw.dirichlet(np.full(count, 2.0)) * (length - shortest * count)
        lengths = [shortest + int(cut) for cut in cuts]
        lengths[-1] += length - sum(lengths)
        return lengths
