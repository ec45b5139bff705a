"""What the campaign of causal types trains on: a few global batches of three documents, and how forwards take them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.causal_cases import VOCAB
from tuner.data.batches import StepBatches, collate, without_targets
from tuner.data.prepared import Row

LENGTHS = (5, 21, 12)  # longer than the windows of the tiny configs, and shorter
STEPS, BATCHES = 20, 4
"""Steps of a training, and how many global batches it sees again and again, so that its loss falls."""
TRAINED = sum(length - 1 for length in LENGTHS)
"""Targets of a global batch."""


def documents(step: int = 0) -> list[npt.NDArray[np.int64]]:
    """The global batch of a step: ids that are no special tokens, in another order of lengths each time."""
    number = step % BATCHES
    generator = np.random.default_rng(5 + number)
    lengths = LENGTHS[number % 3 :] + LENGTHS[: number % 3]
    return [generator.integers(3, VOCAB, length, dtype=np.int64) for length in lengths]


@dataclass(frozen=True)
class Layout:
    """How documents are laid into rows, and rows into forwards; ``micro`` is `train.micro_batch_size`."""

    packing: bool
    micro: int = 1

    def rows(self, step: int, processes: int = 1) -> list[list[int]]:
        """Numbers of the documents in each row; packed rows are as many as processes."""
        if not self.packing:
            return [[0], [1], [2]]
        return [[0, 1, 2]] if processes == 1 else [[0, 1], [2]]

    def batches(self, step: int, rank: int = 0, processes: int = 1) -> StepBatches:
        """One step as one of the processes takes it: neighbouring rows, in as many forwards as the others take."""
        given = documents(step)
        rows = [_row(given, numbers) for numbers in self.rows(step, processes)]
        share = -(-len(rows) // processes)
        mine = rows[rank * share : (rank + 1) * share]
        micro = [collate(mine[start : start + self.micro]) for start in range(0, len(mine), self.micro)]
        micro += [without_targets(micro[0])] * (share // self.micro - len(micro))
        return StepBatches(np.arange(len(rows)), TRAINED, sum(LENGTHS), micro)


LAYOUTS = {"packed": Layout(True), "single": Layout(False), "several": Layout(False, 3)}
"""One row of three documents, a document to a forward, and three rows of one document to a forward."""


def _row(given: Sequence[npt.NDArray[np.int64]], numbers: Sequence[int]) -> Row:
    ids = np.concatenate([given[number] for number in numbers])
    lengths = np.array([len(given[number]) for number in numbers], np.int32)
    return Row(ids, np.ones(len(ids), bool), lengths, np.array(numbers, np.int64))
