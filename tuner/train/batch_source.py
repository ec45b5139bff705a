"""Where the rows of steps come from: the one thing that the loop knows of data."""

from __future__ import annotations

from typing import Protocol

from tuner.data.batches import StepBatches


class BatchSource(Protocol):
    """Rows prepared before, rows of windows that arrive, rows that a part of the launch makes during the run.

    Of rows in a fixed order the number of a step says all. A source with a position of its own is a part's, which notes
    it in checkpoints (``Part.state``) and finds it there.
    """

    waited_s: float
    """Seconds that the newest step waited for its batches."""

    def step(self, index: int) -> StepBatches:
        """The batches of a step, counted from 0 over the run: each rank gets its share. Asked in order, once each."""
