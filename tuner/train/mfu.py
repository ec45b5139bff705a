"""How much of what its device can do a training asks for: model FLOPs utilisation (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.data.batches import Batch
from tuner.model.flops import Flops


@dataclass(frozen=True)
class MfuMeter:
    """A model's arithmetic (:mod:`tuner.model.flops`) against this process's device."""

    flops: Flops
    peak: float
    """Operations a second in one large product, measured before the model was built, in the run's precision."""

    def mfu(self, batches: Sequence[Batch], seconds: float) -> float | None:
        """The share of the peak that forward and backward of these microbatches reach in so many seconds.

        None where the model's arithmetic is not known.
        """
        operations = self.operations(batches)
        return None if operations is None else operations / seconds / self.peak

    def operations(self, batches: Sequence[Batch]) -> float | None:
        """What forward and backward of these microbatches ask for; None where that is not known."""
        if not self.flops.complete:
            return None
        return sum(self.flops.of(batch.lengths, len(batch.trained_positions)) for batch in batches)
