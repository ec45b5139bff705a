"""Rows that were prepared before, collated one step ahead in a thread of their own."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from tuner.data.batches import GlobalBatches, StepBatches
from tuner.data.prepared import PackedRows

# Where the rows of steps come from: the one thing that the loop knows of data.


class BatchSource(Protocol):
    """Rows prepared before, rows of portions that come later, rows that a part of the launch makes during the run.

    Of rows in a fixed order the number of a step says all. A source with a position of its own is a part's, which notes
    it in checkpoints (``Part.state``) and finds it there.
    """

    waited_s: float
    """Seconds that the newest step waited for its batches."""

    def step(self, index: int) -> StepBatches:
        """The batches of a step, counted from 0 over the run: each rank gets its share. Asked in order, once each."""


class Prefetcher:
    """A :class:`~tuner.train.prefetcher.BatchSource`; while one step is trained on, the next is being collated.

    The rows begin after the step ``start_step`` of the run and end with its step ``end``. An error of the thread is
    raised by :meth:`step`, at the step that it belongs to. With ``first_only`` every step gets the first step's batches
    (overfitting them shows whether a model can learn at all).
    """

    def __init__(self, batches: GlobalBatches, end: int, start_step: int = 0, first_only: bool = False) -> None:
        self._batches, self._start_step, self._end, self._first_only = batches, start_step, end, first_only
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._ahead: dict[int, Future[StepBatches]] = {}
        self.waited_s = 0.0

    def step(self, index: int) -> StepBatches:
        """The batches of a step; collating the next one's begins."""
        started = time.monotonic()
        result = (self._ahead.pop(index, None) or self._submit(index)).result()
        self.waited_s = time.monotonic() - started
        if index + 1 < self._end:
            self._ahead[index + 1] = self._submit(index + 1)
        return result

    def switch_to(self, rows: PackedRows, portion: int, start_step: int, end: int) -> None:
        """Switch to the rows of another portion, by its number, after the last step of the one before."""
        assert not self._ahead, "the steps of a portion end with it"
        self._batches.switch_to(rows, portion)
        self._start_step, self._end = start_step, end

    def _submit(self, index: int) -> Future[StepBatches]:
        return self._pool.submit(self._batches.step, 0 if self._first_only else index - self._start_step)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
