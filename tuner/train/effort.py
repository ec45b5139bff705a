"""How much of what its device can do a training asks for: model FLOPs utilisation (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.data.batches import Batch
from tuner.model.flops import Flops


@dataclass(frozen=True)
class Effort:
    """A model's arithmetic (:mod:`tuner.model.flops`) against this process's device."""

    flops: Flops
    peak: float
    """Operations a second in one large product, measured before the model was built, in the run's precision."""

    def mfu(self, batches: Sequence[Batch], seconds: float) -> float:
        """The share of the peak that forward and backward of these microbatches reach in so many seconds."""
        return self.operations(batches) / seconds / self.peak

    def operations(self, batches: Sequence[Batch]) -> float:
        """What forward and backward of these microbatches ask for."""
        return sum(self.flops.of(batch.lengths, len(batch.trained_positions)) for batch in batches)
