"""Learning-rate schedules: pure functions of the step."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """A factor on the learning rate: linear warm-up from zero, then a decay to ``min_ratio`` at the last step.

    ``factor`` takes a 0-based index into the schedule; the first training step uses index 1, so it is never zero.
    """

    kind: Literal["constant", "linear", "cosine"]
    total_steps: int
    warmup_steps: int
    min_ratio: float = 0.0

    def factor(self, index: int) -> float:
        """The factor at ``index``, 0 to ``total_steps``."""
        if index < self.warmup_steps:
            return index / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (index - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        falling = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * falling
